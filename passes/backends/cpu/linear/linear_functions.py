"""Linears over few rows in training, by compiled C.

Before: ``linear(x, w, b)``, and in backward two library calls, each of which takes longer than the matmul.
After: ``linear_low(x, w, b)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.linear import amx_gemm
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear, room, side_by_side
from amp_graph.passes.backends.cpu.linear.panel_gemm import as_rows, library, product
from amp_graph.passes.native.gemm_thresholds import (
    MOST_OF_A_CALL,
)
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch, unsafe_view
from amp_graph.passes.torch_compat.dispatch import is_seen


def linear_low(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors in training, whose sums are rounded once, bias included.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Tensors without readable memory use torch's.
    """
    if leaves_to_torch(x, weight, bias):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return shaped_as(multiplied(as_rows(x), weight.t(), bias), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        plain, rows, of_rows = is_plain(grad), as_rows(grad), None
        if of_x:
            of_rows = (torch.mm if plain else multiplied)(rows, weight).view(*grad.shape[:-1], weight.shape[1])
        if not of_weight:
            return of_rows, None, rows.sum(0) if of_bias else None
        read = as_rows(x)
        if plain or by_units(rows.numel() * read.shape[1]):
            return of_rows, *gradients_of_linear(rows, read, biased=of_bias)
        return of_rows, multiplied(rows.t(), read), rows.sum(0) if of_bias else None


def shaped_as(rows: Tensor, x: Tensor) -> Tensor:
    """Return the result [rows, outputs] of a linear of ``x``, [..., inputs], as [..., outputs].

    Inside a Function, which spares two nodes of autograd. No view: one that a Function returns cannot be written.
    """
    return rows if x.dim() == 2 else unsafe_view(rows, (*x.shape[:-1], rows.shape[1]))


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``product_low``: called directly, or as one operator if a mode, such as a tracer, observes it."""
    if is_seen(a):
        found: Tensor = OPS.product_low(a, b, bias)
        return found
    return product_low(a, b, bias)


def product_low(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias`` of bf16 matrices by compiled C, or without a kernel by torch, rounded once."""
    if library() is None or by_units(a.numel() * b.shape[1]):
        return amx_gemm.amx_product(a, b, bias)
    return product(side_by_side(a), side_by_side(b), bias)


def by_units(multiplications: int) -> bool:
    """Say whether a matmul with this many ``multiplications`` uses the kernel for the matrix units."""
    return multiplications > MOST_OF_A_CALL and amx_gemm.library() is not None


# An operator, so that a traced graph (TrainStep's) has one node.
define_as_typed(product_low, room)

"""Linears in training for converted graphs: compiled C, and oneDNN in the forms for which it is fast.

Before: ``linear(x, w, b)``, and in backward three library calls that each take longer than the matmul; or a result that
starts as copies of the bias, and a matmul with a column-major operand.
After: ``linear_low(x, w, b)``, or ``linear_trained(x, w, b)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.linear import amx_gemm
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear, room, side_by_side
from amp_graph.passes.backends.cpu.linear.panel_gemm import as_rows, library, product
from amp_graph.passes.native.gemm_thresholds import (
    MOST_OF_A_CALL,
    bias_in_trained_linear_is_profitable,
    one_of_two_threads_idles,
)
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.registry import declare
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch, takes_fp32, unsafe_view
from amp_graph.passes.torch_compat.devices import linear_pointwise
from amp_graph.passes.torch_compat.dispatch import is_recorded, is_seen


def linear_low(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors in training, whose sums are rounded once, bias included.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Tensors without readable memory use torch's.
    """
    if leaves_to_torch(x, weight, bias):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


declare(linear_low, fp32_weight_gradient=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return shaped_as(multiplied(as_rows(x), weight.t(), bias), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        # The engine casts a small gradient as fast.
        wide = x is not None and by_units(grad.numel() * x.shape[-1]) and takes_fp32(ctx, 1)
        return gradients_of_low(grad, x, weight, ctx.needs_input_grad, wide)


def shaped_as(rows: Tensor, x: Tensor) -> Tensor:
    """Return the result [rows, outputs] of a linear of ``x``, [..., inputs], as [..., outputs].

    Inside a Function, which spares two nodes of autograd. No view: one that a Function returns cannot be written.
    """
    return rows if x.dim() == 2 else unsafe_view(rows, (*x.shape[:-1], rows.shape[1]))


def gradients_of_low(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, needed: Sequence[bool], wide: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a linear's input ``x``, its ``weight`` and its bias: those that are ``needed``.

    All bf16; ``wide``: that of the weight cast to fp32, except where it is torch's own.
    """
    of_rows, of_weight, of_bias = _gradients_of_rows(grad, None if x is None else as_rows(x), weight, needed, wide)
    if of_rows is not None and grad.dim() != 2:
        of_rows = of_rows.view(*grad.shape[:-1], of_rows.shape[1])
    return of_rows, of_weight, of_bias


def _gradients_of_rows(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, needed: Sequence[bool], wide: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    of_x, of_weight, of_bias = needed
    plain, rows, of_rows = is_plain(grad), as_rows(grad), None
    if of_x:
        assert weight is not None, "saved where the input has a gradient"
        of_rows = torch.mm(rows, weight) if plain else multiplied(rows, weight)
    if not of_weight:
        return of_rows, None, rows.sum(0) if of_bias else None
    assert x is not None, "saved where the weight has a gradient"
    if plain or by_units(rows.numel() * x.shape[1]):
        return of_rows, *gradients_of_linear(rows, x, of_bias, wide)
    return of_rows, multiplied(rows.t(), x, None, wide), rows.sum(0) if of_bias else None


def linear_trained(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors in training, by oneDNN in the forms for which it is fast, else by compiled C.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Graphs, and tensors without readable memory,
    use torch's.
    """
    if leaves_to_torch(x, weight, bias) or is_recorded(x):
        return F.linear(x, weight, bias)
    found: Tensor = _Trained.apply(x, weight, bias)
    return found


declare(linear_trained, fp32_weight_gradient=True)


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        form = _form(x, weight)
        if one_of_two_threads_idles(*form):
            found = multiplied(as_rows(x), weight.t(), bias)
        elif bias is None or linear_pointwise is None or not bias_in_trained_linear_is_profitable(*form):
            found = torch.mm(as_rows(x), weight.t()) if bias is None else torch.addmm(bias, as_rows(x), weight.t())
        else:  # oneDNN reads beyond the memory of an expanded bias
            found = linear_pointwise(as_rows(x), weight, bias.contiguous(), "none", [], "")
        return shaped_as(found, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = as_rows(grad)
        of_rows = _times(rows, weight).view(*grad.shape[:-1], weight.shape[1]) if of_x else None
        if not of_weight:
            return of_rows, None, rows.sum(0) if of_bias else None
        return of_rows, *gradients_of_linear(rows, as_rows(x), of_bias, takes_fp32(ctx, 1))


def _form(x: Tensor, weight: Tensor) -> tuple[str, torch.dtype, int, int, int]:
    outputs, inputs = weight.shape
    return x.device.type, x.dtype, x.numel() // max(1, inputs), outputs, inputs


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight``, by compiled C where one of oneDNN's threads would idle."""
    sizes = (len(rows), weight.shape[1], len(weight))
    own = not is_plain(rows) and one_of_two_threads_idles(rows.device.type, rows.dtype, *sizes)
    return multiplied(rows, weight) if own else torch.mm(rows, weight)


def multiplied(a: Tensor, b: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """``product_low``: called directly, or as one operator if a mode, such as a tracer, observes it."""
    if is_seen(a):
        found: Tensor = OPS.product_low(a, b, bias, wide)
        return found
    return product_low(a, b, bias, wide)


def product_low(a: Tensor, b: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Return ``a @ b + bias`` of bf16 matrices by compiled C, or without a kernel by torch, rounded once.

    ``wide``: then cast to fp32.
    """
    if library() is None or by_units(a.numel() * b.shape[1]):
        return amx_gemm.amx_product(a, b, bias, wide)
    return product(side_by_side(a), side_by_side(b), bias, wide)


def by_units(multiplications: int) -> bool:
    """Say whether a matmul with this many ``multiplications`` uses the kernel for the matrix units."""
    return multiplications > MOST_OF_A_CALL and amx_gemm.library() is not None


# An operator, so that a traced graph (TrainStep's) has one node.
define_as_typed(product_low, lambda a, b, wide: room(a, b, wide))

"""What converted graphs call for linears that train: compiled C over few rows, oneDNN's fast forms over many.

Before: ``linear(x, w, b)``, and in backward three calls of a library that each take longer than they multiply; or a
result that starts as copies of the bias, and a product with columns. After: ``linear_low(x, w, b)``, or
``linear_trained(x, w, b)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.linear_kernel import as_rows, library, product
from amp_graph.passes.operators import OPS, define_as_typed
from amp_graph.passes.torch_private import (
    in_forward_mode,
    in_transform,
    is_batched,
    is_in_mode,
    is_seen,
    is_wrapper,
    linear_pointwise,
    unsafe_view,
)
from amp_graph.passes.turned_operand import turned_product
from amp_graph.passes.what_pays import bias_in_trained_linear_pays


def linear_low(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors that train, whose sums are rounded once, behind the bias.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. What has no memory to read goes to torch's.
    """
    if in_transform() or in_forward_mode() or is_batched(x) or is_wrapper(x) or is_wrapper(weight):
        return F.linear(x, weight, bias)
    # Reshaped out here: a view that a Function returns cannot be written in place.
    found: Tensor = _Linear.apply(as_rows(x), weight, bias)
    return found if x.dim() == 2 else found.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return _multiplied(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # Not what has a derivative itself (create_graph=True), or is several gradients (is_grads_batched=True).
        multiply = torch.mm if torch.is_grad_enabled() or is_batched(grad) else _multiplied
        grad = as_rows(grad)
        return (
            multiply(grad, weight) if of_x else None,
            multiply(grad.t(), x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def linear_trained(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors that train, by oneDNN in the forms that it is fast for.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Tracers, and what has no memory, get torch's.
    """
    if in_transform() or in_forward_mode() or is_batched(x) or is_in_mode(x) or is_wrapper(weight):
        return F.linear(x, weight, bias)
    found: Tensor = _Trained.apply(x, weight, bias)
    return found


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        if bias is None or linear_pointwise is None or not bias_in_trained_linear_pays(*_form(x, weight)):
            found = torch.mm(as_rows(x), weight.t()) if bias is None else torch.addmm(bias, as_rows(x), weight.t())
        else:  # of a bias that is expanded oneDNN reads what lies behind
            found = linear_pointwise(as_rows(x), weight, bias.contiguous(), "none", [], "")
        # No view, which could not be written in place.
        return found if x.dim() == 2 else unsafe_view(found, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = as_rows(grad)
        of_rows = torch.mm(rows, weight).view(*grad.shape[:-1], weight.shape[1]) if of_x else None
        return of_rows, turned_product(rows, as_rows(x)) if of_weight else None, rows.sum(0) if of_bias else None


def _form(x: Tensor, weight: Tensor) -> tuple[str, torch.dtype, int, int, int]:
    outputs, inputs = weight.shape
    return x.device.type, x.dtype, x.numel() // max(1, inputs), outputs, inputs


def _multiplied(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``: at once, or as one operator where a mode is to see it, a tracer say."""
    if is_seen(a):
        found: Tensor = OPS.product_low(a, b, bias)
        return found
    return product_low(a, b, bias)


def product_low(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias`` of bf16 matrices by compiled C, or without a kernel by torch, rounded once."""
    if library() is not None:
        return product(_side_by_side(a), _side_by_side(b), bias)
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _side_by_side(t: Tensor) -> Tensor:
    return t if 1 in t.stride() else t.contiguous()


def _empty(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


# An operator, so that a graph in which it is traced (TrainStep's) has one node.
define_as_typed(product_low, _empty)

"""What converted graphs call for a residual sum, the norm behind it, and the casts around both.

Before: ``s = x + branch; n = layer_norm(s, ...); a, b = shared_cast(n, bf16, 2, False)``. After:
``s, a, b = add_norm(x, branch, ...)``: one pass over memory, and one in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.norm_ops import OPS, residual_norm, residual_norm_backward
from amp_graph.passes.runtime import shared_cast
from amp_graph.passes.torch_private import in_forward_mode, in_transform, is_batched, is_seen, is_wrapper


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    low: int,
    full: bool,
    keep: bool,
    centered: bool = True,
) -> tuple[Tensor, ...]:
    """Return ``s = x + branch``, its norm over ``shape`` in fp32, and ``low`` aliases of that norm in ``dtype``.

    x, branch: CPU tensors of one shape, fp32 or ``dtype``; weight, bias: of ``shape``, fp32 or ``dtype``. Of the
    results the first is there with ``keep``, for whoever else reads the sum (or ``x``), the second with ``full``.
    Statistics are fp32, and what is low is rounded once. Backward adds the gradients of all readers in fp32, and gives
    ``x`` and ``branch`` each theirs in its own dtype. ``centered``: a layer norm, else an RMS norm.
    """
    given = (x, branch, weight, bias)
    if in_forward_mode() or in_transform() or any(is_wrapper(t) for t in given):
        return _by_torch(*given, shape, eps, dtype, low, full, keep, centered)
    options = (tuple(shape), eps, dtype, low, full, keep, centered)
    if torch.is_grad_enabled():
        made = _AddNorm.apply(*given, *options)
    else:
        _, made = _results(*given, *options)
    return tuple(t for t, wanted in zip(made, (keep, full, *[True] * low), strict=True) if wanted)


def _results(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    eps: float,
    dtype: torch.dtype,
    low: int,
    full: bool,
    keep: bool,
    centered: bool,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the statistics, and what ``add_norm`` returns, with None for what is not wanted."""
    kernel = OPS.residual_norm.default if is_seen(x) else residual_norm
    stats, *made = kernel(x, branch, weight, bias, math.prod(shape), eps, dtype, low > 0, full, centered)
    rest = iter(made)
    # A sum is a result even where nobody reads it: second derivatives reach x and the branch by way of it.
    total = next(rest) if branch is not None else x.view_as(x) if keep else None
    cast = next(rest) if low else None
    wide = next(rest) if full else None
    copies = () if cast is None else (cast, *[cast.view_as(cast) for _ in range(low - 1)])
    return stats, (total, wide, *copies)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
        low: int,
        full: bool,
        keep: bool,
        centered: bool,
    ) -> tuple[Tensor | None, ...]:
        given, options = (x, branch, weight, bias), (shape, eps, dtype, low, full, keep, centered)
        stats, made = _results(*given, *options)
        ctx.save_for_backward(x if branch is None else made[0], stats, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.dtypes = (shape, dtype, eps, centered), (x.dtype, None if branch is None else branch.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor | None, *grads: Tensor | None) -> Any:
        found = [g for g in grads if g is not None]
        if grad_sum is None and not found:
            return (None,) * 11
        by_torch = torch.is_grad_enabled() or any(is_batched(g) for g in (grad_sum, *found) if g is not None)
        gradients = _gradients_by_torch if by_torch else _gradients
        dsum, *parameters = gradients(ctx, grad_sum, found) if found else (grad_sum.to, None, None)
        needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        return *(dsum(dtype) if need else None for dtype, need in needed), *parameters, *[None] * 7


Gradients = tuple[Callable[[torch.dtype], Any], Tensor | None, Tensor | None]


def _gradients(ctx: Any, grad_sum: Tensor | None, grads: list[Tensor]) -> Gradients:
    """Return what gives the sum's gradient in a dtype, and the gradients of weight and bias."""
    total, stats, weight, bias = ctx.saved_tensors
    shape, low, _, centered = ctx.norm
    need = ctx.needs_input_grad
    wanted = {dtype for dtype, needed in zip(ctx.dtypes, need, strict=False) if needed}
    wants = (torch.float32 in wanted, low in wanted, need[2], need[3])
    kernel = OPS.residual_norm_backward.default if is_seen(grads[0]) else residual_norm_backward
    made = iter(kernel(grads, grad_sum, total, stats, weight, math.prod(shape), low, *wants, centered))
    sums = {dtype: next(made) for dtype, want in zip((torch.float32, low), wants, strict=False) if want}
    parameters = [
        next(made).view(shape).to(t.dtype) if want else None for t, want in zip((weight, bias), wants[2:], strict=True)
    ]
    return sums.__getitem__, *parameters


def _gradients_by_torch(ctx: Any, grad_sum: Tensor | None, grads: list[Tensor]) -> Gradients:
    """Do the same by operations that have a second derivative, for ``create_graph=True``."""
    total, _, weight, bias = ctx.saved_tensors
    shape, _, eps, centered = ctx.norm
    inputs = [t if t is not None and t.requires_grad else None for t in (total, weight, bias)]
    with torch.enable_grad():
        out = _normed(total, shape, weight, bias, eps, centered)
        wanted = [t for t in inputs if t is not None]
        grad = sum(g.float() for g in grads)
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        dsum, dweight, dbias = [None if t is None else next(found) for t in inputs]
        if dsum is not None and grad_sum is not None:
            dsum = dsum.float() + grad_sum
    return (lambda dtype: dsum.to(dtype)), dweight, dbias


def _normed(
    total: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """Return the norm of ``total`` in fp32, by torch's operations."""
    wide, (w, b) = total.float(), (None if t is None else t.float() for t in (weight, bias))
    if centered:
        return torch.layer_norm(wide, tuple(shape), w, b, eps)
    places = tuple(range(-len(shape), 0))
    out = wide * torch.rsqrt(wide.square().mean(places, keepdim=True) + eps)
    return out if w is None else out * w


def _by_torch(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: Sequence[int],
    eps: float,
    dtype: torch.dtype,
    low: int,
    full: bool,
    keep: bool,
    centered: bool,
) -> tuple[Tensor, ...]:
    total = x if branch is None else x + branch
    normed = _normed(total, shape, weight, bias, eps, centered)
    results = shared_cast(normed, dtype, low, full) if low else (normed,)
    return (total, *results) if keep else results

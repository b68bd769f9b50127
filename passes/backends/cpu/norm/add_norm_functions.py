"""A residual sum, the following norm, and the casts around both, for converted graphs.

Before: ``s = x + branch; n = layer_norm(s, ...); a, b = shared_cast(n, bf16, 2, False)``.
After: ``s, a, b = add_norm(x, branch, ...)``: one pass over memory, and one in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.passes.backends.cpu.norm.add_norm_kernel import OPS, residual_norm, residual_norm_backward
from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_seen
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch

own_functions(__name__)

# Index of the norm's first low-precision alias: after the sum, and the norm in fp32.
LOWS = 2


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

    x, branch: CPU tensors of one shape, fp32 or ``dtype``; weight, bias: of ``shape``, fp32 or ``dtype``. The first
    result is returned with ``keep``, for other readers of the sum (or ``x``), the second with ``full``. Statistics are
    fp32, and low-precision results are rounded once. Backward adds the gradients of all readers in fp32, and gives
    ``x`` and ``branch`` each theirs in its own dtype. ``centered``: a layer norm, else an RMS norm.
    """
    given, form = (x, branch, weight, bias), Form(tuple(shape), eps, dtype, low, full, keep, centered)
    if leaves_to_torch(*given):
        return _by_torch(*given, form)
    made = _AddNorm.apply(*given, form) if torch.is_grad_enabled() else _results(*given, form)[1]
    return tuple(t for t, wanted in zip(made, (keep, full, *[True] * low), strict=True) if wanted)


class Form(NamedTuple):
    """The arguments of ``add_norm`` besides tensors."""

    shape: tuple[int, ...]
    eps: float
    dtype: torch.dtype
    low: int
    full: bool
    keep: bool
    centered: bool


def _results(
    x: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the statistics, and the results of ``add_norm``, with None for unwanted ones."""
    kernel = OPS.residual_norm.default if is_seen(x) else residual_norm
    wants = (form.low > 0, form.full, form.centered)
    stats, *made = kernel(x, branch, weight, bias, math.prod(form.shape), form.eps, form.dtype, *wants)
    rest = iter(made)
    # A sum is a result even without readers: second derivatives reach x and the branch through it.
    total = next(rest) if branch is not None else x.view_as(x) if form.keep else None
    cast = next(rest) if form.low else None
    wide = next(rest) if form.full else None
    copies = () if cast is None else (cast, *[cast.view_as(cast) for _ in range(form.low - 1)])
    return stats, (total, wide, *copies)


def normed_again(total: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
    """Recompute the low-precision norm of ``add_norm``: the same bits."""
    alone = form._replace(low=1, full=False, keep=False)
    found: Any = _results(total, None, weight, bias, alone)[1][LOWS]
    return found


# What gives the sum's gradient in a dtype, and the gradients of weight and bias.
Gradients = tuple[Callable[[torch.dtype], Tensor], Tensor | None, Tensor | None]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
    ) -> tuple[Tensor | None, ...]:
        stats, made = _results(x, branch, weight, bias, form)
        ctx.save_for_backward(x if branch is None else made[0], stats, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.form, ctx.dtypes = form, (x.dtype, None if branch is None else branch.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor | None, *grads: Tensor | None) -> Any:
        found, all_grads = [g for g in grads if g is not None], [g for g in (grad_sum, *grads) if g is not None]
        if not all_grads:
            return (None,) * 5
        made: Gradients = (all_grads[0].to, None, None)
        if found and is_plain(*all_grads):
            made = _gradients_by_torch(ctx, grad_sum, found)
        elif found:
            made = _gradients(ctx, grad_sum, found)
        dsum, dweight, dbias = made
        needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        return *(dsum(dtype) if need else None for dtype, need in needed), dweight, dbias, None


def _gradients(ctx: Any, grad_sum: Tensor | None, grads: list[Tensor]) -> Gradients:
    """Return a function for the sum's gradient in a dtype, and the gradients of weight and bias."""
    total, stats, weight, bias = ctx.saved_tensors
    form, need = ctx.form, ctx.needs_input_grad
    wanted = {dtype for dtype, needed in zip(ctx.dtypes, need, strict=False) if needed}
    wants = (torch.float32 in wanted, form.dtype in wanted, need[2], need[3])
    kernel = OPS.residual_norm_backward.default if is_seen(grads[0]) else residual_norm_backward
    size = math.prod(form.shape)
    made = iter(kernel(grads, grad_sum, total, stats, weight, size, form.dtype, *wants, form.centered))
    sums = {dtype: next(made) for dtype, want in zip((torch.float32, form.dtype), wants, strict=False) if want}
    dweight, dbias = (
        next(made).view(form.shape).to(t.dtype) if want else None
        for t, want in zip((weight, bias), wants[2:], strict=True)
    )
    return sums.__getitem__, dweight, dbias


def _gradients_by_torch(ctx: Any, grad_sum: Tensor | None, grads: list[Tensor]) -> Gradients:
    """Do the same by operations that have a second derivative, for ``create_graph=True``."""
    total, _, weight, bias = ctx.saved_tensors
    inputs = [t if t is not None and t.requires_grad else None for t in (total, weight, bias)]
    with torch.enable_grad():
        out = _normed(total, weight, bias, ctx.form)
        grad = torch.stack([g.float() for g in grads]).sum(0)
        wanted = [t for t in inputs if t is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        dsum, dweight, dbias = [None if t is None else next(found) for t in inputs]
        wide = torch.zeros_like(out) if dsum is None else dsum.float()
        wide = wide if grad_sum is None else wide + grad_sum
    return wide.to, dweight, dbias


def _normed(total: Tensor, weight: Tensor | None, bias: Tensor | None, form: Form) -> Tensor:
    """Return the norm of ``total`` in fp32, by torch's operations."""
    wide, (w, b) = total.float(), (None if t is None else t.float() for t in (weight, bias))
    if form.centered:
        return torch.layer_norm(wide, form.shape, w, b, form.eps)
    places = tuple(range(-len(form.shape), 0))
    out = wide * torch.rsqrt(wide.square().mean(places, keepdim=True) + form.eps)
    return out if w is None else out * w


def _by_torch(
    x: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None, form: Form
) -> tuple[Tensor, ...]:
    total = x if branch is None else x + branch
    normed = _normed(total, weight, bias, form)
    results = shared_cast(normed, form.dtype, form.low, form.full) if form.low else (normed,)
    return (total, *results) if form.keep else results

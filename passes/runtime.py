"""What rewritten graphs call that torch does not have: functions with a backward of their own.

Before: three casts of one value, whose gradients are each widened and then added. After: ``shared_cast``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from amp_graph.passes.cast_kernel import total_of
from amp_graph.passes.derivatives import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.registry import own_functions

own_functions(__name__)

# As whole numbers the least of each precision whose sign bit is set, minus infinity; above it are NaNs, then zero.
_MINUS_INFINITY = {torch.bfloat16: -(1 << 7), torch.float16: -(1 << 10)}


def relu_in_place(x: torch.Tensor) -> torch.Tensor:
    """``x.relu_()`` of a dense low-precision CPU tensor without gradient, on its bits: four times as fast.

    torch widens, compares and rounds again; all that is negative lies up to minus infinity as 16-bit integers, too.
    NaN stays NaN, which oneDNN's relu behind a product makes 0; -0 becomes 0.
    """
    torch.threshold_(x.view(torch.int16), _MINUS_INFINITY[x.dtype], 0)
    return x


def activated(x: torch.Tensor, after: str, form: str = "none") -> torch.Tensor:
    """Return ``x`` through ``after``: "none", "relu", "silu", "hardswish", or "gelu" in ``form``.

    By torch's operations, and written over ``x`` but by gelu.
    """
    if after == "relu":
        return x.relu_()
    if after == "silu":
        return F.silu(x, inplace=True)
    if after == "hardswish":
        return F.hardswish(x, inplace=True)
    return F.gelu(x, approximate=form) if after == "gelu" else x


class _SharedCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
        ctx.full = full
        cast = x.to(dtype)
        copies = [cast, *[cast.view_as(cast) for _ in range(low - 1)]]
        return (x.view_as(x), *copies) if full else tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, None
        total = given[0]
        if len(given) == 1:
            return total.float(), None, None, None
        if is_plain(*given):  # nothing in place
            return sum((g.float() for g in given[1:]), total.float()), None, None, None
        if (made := total_of(given)) is not None:
            return made, None, None, None
        # The first sum must be made in fp32, where a full-precision reader did not already make it so.
        total = total if total.dtype == torch.float32 else total.float()
        for index, grad in enumerate(given[1:]):
            fresh = index > 0 or given[0].dtype != torch.float32
            total = total.add_(grad) if fresh else total.add(grad)
        return total, None, None, None


def shared_cast(x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
    """Cast ``x`` (fp32) once for ``low`` readers in ``dtype``; with ``full``, ``x`` itself comes first.

    Returns aliases of one low-precision copy, one a reader. Backward adds the readers' gradients in fp32, as
    one cast a reader would, where a plain shared cast would have them added, and rounded, in ``dtype``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or leaves_to_torch(x):
        cast = x.to(dtype)
        return (x, *([cast] * low)) if full else (cast,) * low
    return _SharedCast.apply(x, dtype, low, full)


class _LowLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        shape: tuple[int, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        out, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        need = ctx.needs_input_grad
        if is_plain(grad):
            again = lambda x, w, b: torch.layer_norm(x.float(), ctx.shape, w, b, ctx.eps).to(x.dtype)  # noqa: E731
            needed = (need[0], need[2], need[3])
            dx, dweight, dbias = gradients_by_torch(again, (x, weight, bias), needed, (grad,))
            return dx, None, dweight, dbias, None
        dx = dweight = dbias = None
        if need[0]:
            kernel = torch.ops.aten.native_layer_norm_backward
            dx = kernel(grad.contiguous(), x, ctx.shape, mean, rstd, weight, weight, [True, False, False])[0]
        if need[2]:
            dweight = _sum_of_products(x, grad, mean, rstd, weight)
        if need[3]:
            rows = grad.flatten(0, x.dim() - len(ctx.shape) - 1) if x.dim() > len(ctx.shape) else grad.unsqueeze(0)
            dbias = rows.sum(0, dtype=torch.float32)
        return dx, None, dweight, dbias, None


CHUNK = 393_216  # elements of fp32 scratch that stay in cache


def _sum_of_products(
    x: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return the sum over rows of ``(x - mean) * rstd * grad`` in fp32, by chunks that stay in cache.

    Mixed operands promote inside the kernels: nothing is rounded to low precision on the way, and nothing cast.
    """
    # mean and rstd are fp32 as the kernel returns them; its fake says otherwise.
    width = weight.numel()
    if not width:
        return torch.zeros_like(weight)
    flat = [t.reshape(-1, width) for t in (x, grad)] + [t.float().reshape(-1, 1) for t in (mean, rstd)]
    rows = max(1, CHUNK // width)
    parts = zip(*(t.split(rows) for t in flat), strict=True) if flat[0].shape[0] > rows else [flat]
    total = None
    for one_x, one_grad, one_mean, one_rstd in parts:
        product = torch.sub(one_x, one_mean).mul_(one_rstd)
        product = product.mul_(one_grad)
        total = product.sum(0) if total is None else total + product.sum(0)
    return torch.zeros_like(weight) if total is None else total.view_as(weight)


def layer_norm_low(
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """``F.layer_norm`` of a low-precision ``x`` with fp32 ``weight`` and ``bias``, and exact gradients for those.

    The CPU kernel's backward loses them when its input is bf16: 3.6 % relative error at 1,024 rows, 14-42 %
    at 16,384 (``aten/src/ATen/native/cpu/layer_norm_kernel.cpp``). Here the sums over rows are fp32.
    """
    if leaves_to_torch(x, weight, bias):
        return torch.layer_norm(x.float(), normalized_shape, weight, bias, eps).to(x.dtype)
    if not torch.is_grad_enabled():
        return torch.layer_norm(x, normalized_shape, weight, bias, eps)
    return _LowLayerNorm.apply(x, tuple(normalized_shape), weight, bias, eps)

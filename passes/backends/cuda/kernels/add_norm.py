"""A residual sum with the norm behind it, and their casts, by Triton on CUDA.

Before: ``add``, ``native_layer_norm`` and ``_to_copy``, each over all of memory, and three more in backward.
After: ``residual_norm`` and ``residual_norm_backward``, as those of C on the CPU: one pass each.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.backends.cpu.norm.add_norm_by_torch import norm_by_torch, norm_gradients_by_torch
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.native.triton_loader import launch, require

SOURCE = "amp_graph.passes.backends.cuda.kernels.add_norm_source"
GRADS = 4  # gradients that the kernel adds itself
RESIDENT = 8192  # elements of rows that a multiprocessor holds in registers at once


def forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    low: torch.dtype,
    wants_low: bool,
    wants_full: bool,
    centered: bool,
) -> list[Tensor]:
    """Return what ``residual_norm`` does; torch computes it where the kernel cannot be launched."""
    again = (x, branch, weight, bias, width, eps, low, wants_low, wants_full, centered)
    if not x.numel():
        return norm_by_torch(*again)
    x = x.contiguous()
    branch, weight, bias = (None if t is None else t.contiguous() for t in (branch, weight, bias))
    rows = x.numel() // width
    stats = x.new_empty((2, rows), dtype=torch.float32)
    total = None if branch is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
    cast = torch.empty_like(x, dtype=low) if wants_low else None
    wide = torch.empty_like(x, dtype=torch.float32) if wants_full else None
    given = (x, *(x if t is None else t for t in (branch, weight, bias, total, cast, wide)), stats, rows, width, eps)
    options = {"SUMMED": branch is not None, "WEIGHTED": weight is not None, "BIASED": bias is not None}
    options |= {"LOW": wants_low, "WIDE": wants_full, "CENTERED": centered}
    try:
        launch(SOURCE, "forward_kernel", rows, given, warps=_warps(width), **options, BLOCK=_block(width))
    except CompilerError:
        return norm_by_torch(*again)
    return [stats, *(t for t in (total, cast, wide) if t is not None)]


def backward(
    grads: list[Tensor],
    grad_sum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    width: int,
    low: torch.dtype,
    wants_full: bool,
    wants_low: bool,
    wants_weight: bool,
    wants_bias: bool,
    centered: bool,
) -> list[Tensor]:
    """Return what ``residual_norm_backward`` does; torch computes it where the kernel cannot be launched."""
    wants = (wants_full, wants_low, wants_weight, wants_bias)
    again = (grads, grad_sum, total, stats, weight, width, low, *wants, centered)
    if not total.numel():
        return norm_gradients_by_torch(*again)
    grads = [g.contiguous() for g in _few(grads)]
    grad_sum, weight = (None if t is None else t.contiguous() for t in (grad_sum, weight))
    total = total.contiguous()
    rows, programs = stats.shape[1], _programs(stats, width)
    dsum = torch.empty_like(total, dtype=torch.float32) if wants_full else None
    dlow = torch.empty_like(total, dtype=low) if wants_low else None
    parts = [stats.new_empty((programs, width)) if wanted else None for wanted in (wants_weight, wants_bias)]
    some = [t if t is not None else stats for t in (dsum, dlow, *parts)]
    padded = [*grads, *[grads[0]] * (GRADS - len(grads))]
    others = [stats if t is None else t for t in (grad_sum, weight)]
    given = (*padded, others[0], total, stats, others[1], *some, rows, width)
    options = {"COUNT": len(grads), "SUMMED": grad_sum is not None, "WEIGHTED": weight is not None}
    options |= dict(zip(("WIDE", "LOW", "OF_WEIGHT", "OF_BIAS"), wants, strict=True)) | {"CENTERED": centered}
    try:
        launch(SOURCE, "backward_kernel", programs, given, warps=_warps(width), **options, BLOCK=_block(width))
    except CompilerError:
        return norm_gradients_by_torch(*again)
    return [*(t for t in (dsum, dlow) if t is not None), *(part.sum(0) for part in parts if part is not None)]


def _few(grads: list[Tensor]) -> list[Tensor]:
    """Return at most as many gradients as the kernel takes: the rest of them are added in fp32."""
    if len(grads) <= GRADS:
        return grads
    rest = grads[GRADS - 1].float()
    for more in grads[GRADS:]:
        rest = rest + more
    return [*grads[: GRADS - 1], rest]


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _warps(width: int) -> int:
    """Return warps for 8 elements per thread, of at most 32."""
    return min(32, max(1, _block(width) // 256))


def _programs(stats: Tensor, width: int) -> int:
    """Return how many programs share the rows: as many as run at once, each with one row of partial sums."""
    return min(stats.shape[1], _multiprocessors(stats.device) * max(1, min(8, RESIDENT // _block(width))))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def kernels(low: torch.dtype) -> SimpleNamespace:
    """Return the functions of both directions. Raises CompilerError where no kernel runs, with the reason."""
    require(SOURCE, why_wrong)
    return KERNELS


KERNELS = SimpleNamespace(forward=forward, backward=backward)
register_kernel("add_norm on cuda", kernels)


def why_wrong(device: torch.device) -> str:
    """Return how the kernels differ from torch on small rows of ``device``, or ""."""
    x = torch.linspace(-3, 3, 5 * 37, dtype=torch.float32, device=device).view(5, 37).sin()
    branch, weight = x.cos().bfloat16(), x[0] + 2
    for centered in (True, False):
        given: Any = (x, branch, weight, weight, 37, 1e-5, torch.bfloat16, True, True, centered)
        made, expected = forward(*given), norm_by_torch(*given)
        again: Any = ([made[2], made[3]], x, made[1], made[0], weight, 37, torch.bfloat16, *[True] * 4, centered)
        pairs = zip([*made, *backward(*again)], [*expected, *norm_gradients_by_torch(*again)], strict=True)
        # The interpreter of Triton does not round to bf16, it cuts off.
        limits = ((a.float(), b.float(), 2**-7 if a.dtype != x.dtype else 1e-4) for a, b in pairs)
        if not all(torch.allclose(a, b, rtol=limit, atol=1e-4) for a, b, limit in limits):
            return "its numbers are not torch's on this device"
    return ""

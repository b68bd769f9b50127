"""New memory for large results on huge pages, where the system grants them on request.

Before: ``logits.float()``, of 32 MiB or more: mapped anew at each call, with a page fault per 4 KiB.
After: ``widen(logits)``: one page fault per 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.native.cast_kernel import copy_into
from amp_graph.passes.native.jit_compiler import of_c_library
from amp_graph.passes.profitability.thresholds import large_pages_are_profitable
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import in_forward_mode, in_transform, is_batched, is_in_mode
from amp_graph.passes.torch_compat.storage import address_of, bytes_of

own_functions(__name__)


def empty_like(x: Tensor, **options: Any) -> Tensor:
    """``torch.empty_like``, on huge pages where that is profitable and the system grants it."""
    return _on_large_pages(torch.empty_like(x, **options))


def empty(shape: Sequence[int]) -> Tensor:
    """``torch.empty(shape)`` in fp32, on huge pages."""
    return _on_large_pages(torch.empty(shape, dtype=torch.float32))


def _on_large_pages(made: Tensor) -> Tensor:
    if type(made) is Tensor and large_pages_are_profitable(made.device.type, bytes_of(made)):  # fakes have no memory
        _ask(made)
    return made


def widen(x: Tensor) -> Tensor:
    """``x.float()`` of a low-precision ``x`` in such memory. Under transforms, torch's own operation."""
    if not is_torchs(x):
        return copy_into(empty_like(x, dtype=torch.float32), x)
    if in_transform() or in_forward_mode() or is_batched(x) or is_in_mode(x):
        return x.float()
    found: Tensor = _Widened.apply(x)
    return found


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.low = x.dtype
        return copy_into(empty_like(x, dtype=torch.float32), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() or is_batched(grad):  # create_graph=True, is_grads_batched=True
            return grad.to(ctx.low)
        return copy_into(torch.empty_like(grad, dtype=ctx.low), grad)


def is_torchs(x: Tensor) -> bool:
    """Say whether gradients or transforms need torch's own operation."""
    return (torch.is_grad_enabled() and x.requires_grad) or in_forward_mode() or is_batched(x)


def _ask(made: Tensor) -> None:
    """Request huge pages for the whole pages that ``made`` owns alone. The system may decline."""
    advise, size = _madvise(), mmap.PAGESIZE
    start = -(-address_of(made) // size) * size
    length = (address_of(made) + bytes_of(made)) // size * size - start
    if advise is not None and length > 0:
        advise(start, length, mmap.MADV_HUGEPAGE)


@lru_cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's ``madvise``; None where huge pages cannot be requested: anywhere but on Linux."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = of_c_library("madvise")
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found

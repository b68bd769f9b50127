"""New memory for large results, which the system maps by large pages where it does that for who asks.

Before: ``logits.float()``, of 32 MiB or more: mapped anew at each call, with a page fault for every 4 KiB. After:
``widen(logits)``: one for every 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.native_code import of_c_library
from amp_graph.passes.torch_private import bytes_of, in_forward_mode, is_batched
from amp_graph.passes.what_pays import large_pages_pay


def empty_like(x: Tensor, **options: Any) -> Tensor:
    """``torch.empty_like``, whose pages are large where ``what_pays`` says that this pays and the system grants it."""
    made = torch.empty_like(x, **options)
    if type(made) is Tensor and large_pages_pay(made.device.type, bytes_of(made)):  # fakes have no memory
        _ask(made)
    return made


def widen(x: Tensor) -> Tensor:
    """``x.float()`` of a low-precision ``x`` in such memory. With gradients, and under transforms, torch's own."""
    if (torch.is_grad_enabled() and x.requires_grad) or in_forward_mode() or is_batched(x):
        return x.float()
    return empty_like(x, dtype=torch.float32).copy_(x)


def _ask(made: Tensor) -> None:
    """Ask for large pages for the whole pages that ``made`` has to itself. What the system answers is its business."""
    advise, size = _madvise(), mmap.PAGESIZE
    start = -(-made.data_ptr() // size) * size
    length = (made.data_ptr() + bytes_of(made)) // size * size - start
    if advise is not None and length > 0:
        advise(start, length, mmap.MADV_HUGEPAGE)


@lru_cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's ``madvise``; None where there are no large pages to ask for: Linux alone has them so."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = of_c_library("madvise")
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found

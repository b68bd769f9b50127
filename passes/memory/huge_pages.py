"""New memory for large results on huge pages, where the system grants them on request.

Before: ``logits.float()``, of 32 MiB or more: mapped anew at each call, with a page fault per 4 KiB.
After: ``widen(logits)``: one page fault per 2 MiB; or ``widen_again(logits, 0)``: none, once nobody holds an earlier
result.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.memory.gradient_buffers import is_free
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


class LargeResults:
    """Memory of a model's large results, reused once nobody holds them; lives with the model's conversion.

    Up to two buffers per result: the last result is usually held until the next one exists.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[Tensor]] = {}
        self.widen_again = self._reader()

    def taken(self, shape: Sequence[int], place: int) -> Tensor:
        """Return uninitialized fp32 memory for a result, which nothing else reads or writes.

        place: the number of the result, which shares its memory with no other result.
        """
        made = self._made.pop(place, [])  # no other thread finds it now
        own = next((t for t in reversed(made) if t.shape == shape and is_free(t)), None)  # the warmest
        if own is None:
            with torch.inference_mode(False):
                own = empty(shape)
        given = own.detach()
        self._made[place] = [*(t for t in made if t is not own), own][-2:]
        return given

    def drop(self) -> int:
        """Release the memory and return how many bytes it was; results that are still held stay valid."""
        size = sum(bytes_of(t) for t in self.tensors)
        self._made.clear()
        return size

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that is kept."""
        return [own for made in list(self._made.values()) for own in made]

    def _reader(self) -> Callable[[Tensor, int], Tensor]:
        def widen_again(x: Tensor, place: int) -> Tensor:
            """Return ``widen(x)`` in the memory of ``place``."""
            if is_in_mode(x) or not x.is_contiguous() or is_torchs(x):
                return widen(x)
            return copy_into(self.taken(x.shape, place), x)

        return widen_again


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

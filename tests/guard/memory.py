"""Tensors between two pages that nobody may touch, for whatever Python allocates while a kernel is called.

Before: ``x.contiguous()`` and ``torch.empty(...)`` amid other memory, behind which a kernel may read unseen. After, in
``Guarded("end")``: every new tensor ends at a page whose touch kills the process, and what is not initialised is NaN.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

PLACES = ("end", "begin")  # at which of its ends a tensor touches a guard page
PAGE = mmap.PAGESIZE
POISON = 0xFF  # of all bytes: a NaN in any precision, and -1
NOT_INITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, place: str) -> Tensor:
    """Return a tensor full of poison whose memory ends, or begins, at a page that kills who touches it.

    Without elements it has no memory: its address is null.
    """
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
    if not count:
        return torch.empty_strided(shape, strides, dtype=dtype)
    size = count * dtype.itemsize
    data = -(-size // PAGE) * PAGE
    pages = mmap.mmap(-1, data + 2 * PAGE)
    start = PAGE + (data - size if place == "end" else 0)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    whole[PAGE:-PAGE].fill_(POISON)
    flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=start)
    for page in (whole.data_ptr(), whole.data_ptr() + data + PAGE):
        if _mprotect(page, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return flat.as_strided(shape, strides)


class Guarded(TorchFunctionMode):
    """Moves every new tensor of the CPU that torch's Python functions return between guard pages.

    Views of what is there already, and results of operations in place, stay where they are.
    """

    def __init__(self, place: str) -> None:
        """``place``: one of ``PLACES``."""
        super().__init__()
        self.place = place
        self._own: dict[int, Any] = {}  # by the address of a storage, which is kept: addresses are not given again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and move what it makes."""
        made = func(*args, **(kwargs or {}))
        poison = getattr(func, "__name__", "") in NOT_INITIALISED
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        return tree_map_only(Tensor, lambda t: self._moved(t, given, poison), made)

    def _moved(self, made: Tensor, given: set[int], poison: bool) -> Tensor:
        if not _is_plain(made) or not made.numel():
            return made
        address = made.untyped_storage().data_ptr()
        if address in self._own or address in given:
            return made
        moved = guarded(tuple(made.shape), made.stride(), made.dtype, self.place)
        if not poison:
            moved.copy_(made.detach())
        self._own[moved.untyped_storage().data_ptr()] = moved.untyped_storage()
        return moved


def _is_plain(t: Tensor) -> bool:
    dense = t.layout is torch.strided and t.device.type == "cpu"
    return dense and type(t) is Tensor and t.grad_fn is None and not t.requires_grad and 0 not in t.stride()


def _tensors(nested: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, nested)
    yield from (t for t in found if t.layout is torch.strided)

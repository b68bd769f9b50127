"""The memory behind tensors, and who holds it: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # 2.11 - 2.13

Known = TypeVar("Known")
# Hidden from subclasses; 2.11 - 2.13.
_BASE: Any = torch._C.TensorBase
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = _BASE.untyped_storage
address_of: Callable[[torch.Tensor], int] = _BASE.data_ptr


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of the storage of ``tensor``; None if it has none (sparse, subclasses)."""
    try:
        return int(storage_of(tensor)._cdata)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


class Memory(dict[Any, tuple[StorageWeakRef, Known]]):
    """What is known of memory, by the tensors in it; ``part``: what tells parts of one memory, and versions, apart.

    Memory is held weakly: nothing is kept alive, and no other memory gets its number meanwhile.
    """

    def known(self, tensor: torch.Tensor, *part: Any) -> Known | None:
        """Return what is known of a tensor's memory, None if nothing is."""
        return self[key][1] if self and (key := (storage_key(tensor), *part)) in self else None

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Known]:
        """Return what is known of any of ``tensors``."""
        return [known for t in tensors if (known := self.known(t)) is not None] if self else []

    def keep(self, tensor: torch.Tensor, known: Known, *part: Any) -> None:
        """Keep what is known of a tensor that has plain memory."""
        if (key := storage_key(tensor)) is not None:
            self[(key, *part)] = StorageWeakRef(storage_of(tensor)), known


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the storage of ``tensor``; without one (packed tensors), of its elements."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return storage_of(tensor).nbytes()


def storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the tensors, storages, arrays and capsules that hold the memory of ``tensor``; 2.11 - 2.13.

    The first number counts holders of the memory, the second holders of its storage's Python object, of which there is
    only one. Compare the numbers with those of memory that is known to have one holder.
    """
    storage = storage_of(tensor)
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


def all_bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a tensor for which ``is_dense_fp32`` holds."""
    return ctypes.string_at(address_of(tensor), 4 * tensor.numel())


def is_dense_fp32(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is an ordinary fp32 CPU tensor without gaps in memory."""
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return kind and tensor.dtype == torch.float32 and tensor.is_contiguous()

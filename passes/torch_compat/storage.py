"""The memory behind tensors, and who holds it: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # 2.11 - 2.13

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

"""The memory behind tensors, and who holds it: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef  # 2.11 - 2.13

# Hidden from subclasses; 2.11 - 2.13.
_BASE: Any = torch._C.TensorBase
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = _BASE.untyped_storage
address_of: Callable[[torch.Tensor], int] = _BASE.data_ptr
exchange_memory: Callable[[torch.Tensor, torch.Tensor], None] = _BASE.data.__set__  # ``tensor.data = other``

# The identity of a tensor's storage; raises if it has none. Hidden from modes and subclasses.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of the storage of ``tensor``; None if it has none (sparse, subclasses)."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the size of the storage of ``tensor``; without one (packed tensors), of its elements."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    return storage_of(tensor).nbytes()


def holders(owner: Any, name: str) -> tuple[tuple[int, int], int, int]:
    """Count the holders of the tensor ``owner.name``: of its memory (aliases), tensor (autograd) and Python object."""
    tensor = getattr(owner, name)
    counted = storage_holders(tensor)
    return counted, tensor._use_count(), sys.getrefcount(tensor)


def storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """Count the tensors, storages, arrays and capsules that hold the memory of ``tensor``; 2.11 - 2.13.

    The first number counts holders of the memory, the second holders of its storage's Python object, of which there is
    only one. Compare the numbers with those of memory that is known to have one holder.
    """
    storage = storage_of(tensor)
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


def _memory_of(storage: int) -> tuple[int, int, int]:
    """Return three words of a C++ storage: its memory, its deleter, and the deleter's context; 2.13.

    c10::StorageImpl begins with a vtable and a reference count; then a c10::DataPtr. ``memory_owner`` checks that.
    """
    return tuple((ctypes.c_uint64 * 5).from_address(storage)[2:])  # type: ignore[return-value]


@functools.lru_cache
def _how_freed() -> tuple[int, int] | None:
    """Return the deleters of torch's CPU allocator, and of a part of another storage; None: unknown."""
    whole = torch.empty(64, device="cpu").untyped_storage()
    part = whole[:64]
    place, by_allocator, freed = _memory_of(whole._cdata)
    place_of_part, by_part, other = _memory_of(part._cdata)
    as_known = (place, freed, place_of_part, other) == (*[whole.data_ptr()] * 2, part.data_ptr(), whole._cdata)
    return (by_allocator, by_part) if as_known and by_allocator != by_part else None


def memory_owner(storage: torch.UntypedStorage) -> bool | int:
    """Say whether torch's allocator made the memory for ``storage`` alone; or of which storage it is a part; 2.13."""
    known = _how_freed()
    if known is None:
        return False
    place, by, other = _memory_of(storage._cdata)
    if by == known[1]:
        return other
    return by == known[0] and other == place


def holders_of_storage(key: int) -> tuple[int, int]:
    """Count the holders of an existing storage, as ``storage_holders`` does: its parts, and tensors; 2.11 - 2.13."""
    storage = torch.UntypedStorage._new_with_weak_ptr(key)
    return int(torch._C._storage_Use_Count(key)), sys.getrefcount(storage)


def is_private_mapping(storage: torch.UntypedStorage) -> bool:
    """Say whether a write to the file mapping behind ``storage`` is private to this process; False if unknown."""
    try:
        with open("/proc/self/maps") as maps:
            lines = [line.split()[:2] for line in maps]
    except OSError:
        return False
    place = storage.data_ptr()
    for span, rights in lines:
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= place < end:
            return rights.endswith("p") and place + storage.nbytes() <= end
    return False


def modules_with_accesses() -> tuple[types.ModuleType, ...]:
    """Return the modules whose functions give out memory or write it undetected, besides Tensor's; 2.11 - 2.13."""
    return torch, torch.utils.dlpack, torch._C, torch._C._autograd


def forget_what_can_be_overridden() -> None:
    """Clear torch's caches of the functions that ``__torch_function__`` is called for; 2.11 - 2.13.

    They are keyed by identity, and may have been filled before a function was replaced; so may Dynamo's.
    """
    torch._dynamo.trace_rules.get_tensor_method.cache_clear()
    names = ("get_ignored_functions", "get_default_nowrap_functions", "get_testing_overrides",
             "_get_overridable_functions", "_get_tensor_methods")  # fmt: skip
    for name in names:
        getattr(getattr(torch.overrides, name, None), "cache_clear", int)()


def all_bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a tensor for which ``is_dense_fp32`` holds."""
    return ctypes.string_at(address_of(tensor), 4 * tensor.numel())


def is_dense_fp32(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is an ordinary fp32 CPU tensor without gaps in memory."""
    kind = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return kind and tensor.dtype == torch.float32 and tensor.is_contiguous()


def unflatten(piece: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of a one-dimensional ``piece`` with the shapes of ``like``; 2.11 - 2.13."""
    return list(torch._C._nn.unflatten_dense_tensors(piece, like))

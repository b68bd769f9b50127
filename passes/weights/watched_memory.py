"""Track whether a parameter's memory may have been written without its version counter showing it.

Before: ``weight.data[3] = 0`` leaves no trace. After: ``watch_of(weight).mark`` is another object from then on, and
``watch.is_free(weight)`` is false for as long as somebody holds the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.storage import (
    StorageWeakRef,
    holders_of_storage,
    is_private_mapping,
    memory_owner,
    storage_holders,
    storage_id,
    storage_key,
    storage_of,
)

MANY = 1024  # storages: above this number, freed ones are looked for
ADDRESS, HELD, OTHERS = (
    "its address was read (data_ptr), and whoever has it may write there at any time",
    "something else holds its memory: an alias by .data, a numpy array, a storage",
    "it does not own its memory: a numpy array, a file or another process may hold it",
)


class Watch:
    """What is known of the memory of one storage from which weight copies were made.

    mark: a new object after each write or access that version counters do not show. ``out``: somebody may hold the
    memory. ``address``: somebody may know its address as a number, which cannot be revoked.
    """

    __slots__ = ("address", "is_on_cpu", "mark", "out", "storage")

    def __init__(self, storage: StorageWeakRef | None, is_on_cpu: bool = False) -> None:
        """Begin as for memory that anybody may hold."""
        self.is_on_cpu = is_on_cpu
        self.storage, self.mark, self.out, self.address = storage, object(), True, False

    def is_gone(self) -> bool:
        """Say whether the storage was freed."""
        return self.storage is None or self.storage.expired()

    def was_written(self) -> None:
        """Record a completed write."""
        self.mark = object()

    def was_handed_out(self) -> None:
        """Record, once somebody holds it, that the memory can be written from now on."""
        self.out = True
        self.mark = object()

    def why_not_free(self, weight: Tensor) -> str:
        """Say who may write the memory of ``weight`` undetected, or "" if nobody can and reads are stable.

        Read the mark before asking this: an access in between then changes it.
        """
        if self.address:
            return ADDRESS
        if self.out:
            self.out = False  # before looking: an access meanwhile sets it again
            why = _why_held(weight)
            if why:
                self.out = True
                return why
        return ""


_UNSEEN = Watch(None)  # of tensors that wrap others and have no storage
_UNSEEN.address = True
# Keyed by the identity of a storage, which stays unique because the storage is referenced weakly.
WATCHED: dict[int, Watch] = {}
_room = MANY
_MODELS = weakref.WeakSet[torch.nn.Module]()  # whose parameters may be parts of one file


def watch_of(weight: Tensor) -> Watch:
    """Return the watch of the storage of ``weight``, created if missing."""
    key = storage_key(weight)
    if key is None:
        return _UNSEEN
    found = WATCHED.get(key)
    if found is None:
        if len(WATCHED) > _room:
            _purge()
        found = WATCHED.setdefault(key, Watch(StorageWeakRef(storage_of(weight)), weight.is_cpu))
    return found


def _purge() -> None:
    global _room
    for key, watch in list(WATCHED.items()):  # in place, because another thread may add some
        if watch.is_gone():
            WATCHED.pop(key, None)
    _room = max(MANY, 2 * len(WATCHED))


def were_written(tensors: Iterable[Tensor]) -> None:
    """Record that kernels that bypass version counters have written ``tensors``."""
    for tensor in tensors:
        watch = WATCHED.get(storage_key(tensor) or 0)
        if watch is not None:
            watch.was_written()


def handed_out(tensor: Tensor) -> None:
    """Record that somebody obtained the memory of ``tensor``; accepts any tensor, and has to be fast."""
    try:
        watch = WATCHED.get(storage_id(tensor))
    except (RuntimeError, NotImplementedError, TypeError):  # it has no storage
        return
    if watch is not None:
        watch.was_handed_out()


def forget_addresses(weights: Iterable[Tensor]) -> None:
    """Trust the user that nobody writes through an address of ``weights`` any more."""
    for weight in weights:
        watch = WATCHED.get(storage_key(weight) or 0)
        if watch is not None:
            watch.address = False


# -- who has the memory -------------------------------------------------------------------------------


_SOLE = storage_holders(torch.empty(1))  # reference count of memory that one tensor has


def _why_held(weight: Tensor) -> str:
    """Say why the memory of ``weight`` may have another reader or writer than ``weight``, or ""."""
    if storage_holders(weight) != _SOLE:
        return HELD
    storage = storage_of(weight)
    if storage.device.type == "cpu" and (storage.is_shared() or not _is_own(storage)):
        return OTHERS
    return ""


def _is_own(storage: torch.UntypedStorage) -> bool:
    """Say whether ``storage`` owns its memory: allocated for it, or parts of a file that nobody else has."""
    if storage.resizable():
        return True
    owner = memory_owner(storage)
    return owner is True or (owner is not False and _are_all_parts_ours(owner) and is_private_mapping(storage))


def look_at_parts_of(model: torch.nn.Module) -> None:
    """Count the parameters of ``model`` that share one mapped file, as safetensors maps it."""
    _MODELS.add(model)


_counted: dict[int, tuple[tuple[int, int], bool]] = {}


def _are_all_parts_ours(file: int) -> bool:
    """Say whether the existing parts of a mapped ``file`` are exactly tensors of converted models."""
    alive = holders_of_storage(file)
    known = _counted.get(file)
    if known is None or known[0] != alive:
        parts = {}
        for tensor in _tensors():
            key = storage_key(tensor)
            if key is not None and memory_owner(storage_of(tensor)) == file:
                parts[key] = (storage_of(tensor).data_ptr(), storage_of(tensor).nbytes())
        ends = sorted(parts.values())
        apart = all(start + size <= following for (start, size), (following, _) in pairwise(ends))
        known = _counted[file] = (alive, apart and alive == (_SOLE[0] - 1 + len(parts), _SOLE[1]))
    return known[1]


def _tensors() -> Iterator[Tensor]:
    for model in list(_MODELS):
        yield from (t for t in (*model.parameters(), *model.buffers()) if t.layout is torch.strided and t.is_cpu)

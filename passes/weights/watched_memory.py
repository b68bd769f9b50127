"""Whether a parameter's memory may have been written where its version counter does not show it.

Before: ``weight.data[3] = 0``, of which nothing tells. After: ``watch_of(weight).mark`` is another object from then on,
and ``watch.is_free(weight)`` is false for as long as somebody has the memory.
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

MANY = 1024  # storages: above, those that are gone are looked for
ADDRESS, HELD, OTHERS = (
    "its address was given out as a number (data_ptr), and who has it may write there at any time",
    "somebody has its memory beside it: an alias by .data, a numpy array, a storage",
    "its memory is not its own: an array of numpy, a file or another process may have it",
)


class Watch:
    """What is known of the memory of one storage, which copies of weights were made of.

    mark: another object after each write or access that version counters do not show. ``out``: somebody may have the
    memory. ``address``: somebody may have its address as a number, which nothing takes back.
    """

    __slots__ = ("address", "is_on_cpu", "mark", "out", "storage")

    def __init__(self, storage: StorageWeakRef | None, is_on_cpu: bool = False) -> None:
        """Begin as for memory that anybody may have."""
        self.is_on_cpu = is_on_cpu
        self.storage, self.mark, self.out, self.address = storage, object(), True, False

    def is_gone(self) -> bool:
        """Say whether the storage was freed."""
        return self.storage is None or self.storage.expired()

    def was_written(self) -> None:
        """Take note of a write that is over."""
        self.mark = object()

    def was_handed_out(self) -> None:
        """Take note, once somebody has it, that the memory can be written from now on."""
        self.out = True
        self.mark = object()

    def why_not_free(self, weight: Tensor) -> str:
        """Say who may write the memory of ``weight`` unseen, or "" where nobody can: what is read then stays so.

        The mark is to be read before this is asked: an access in between then makes it another.
        """
        if self.address:
            return ADDRESS
        if self.out:
            self.out = False  # before looking: what is handed out meanwhile is out again
            why = _why_held(weight)
            if why:
                self.out = True
                return why
        return ""


_UNSEEN = Watch(None)  # of tensors that stand for others and have no storage
_UNSEEN.address = True
# By what identifies a storage, which no other gets while it is here: storages are held weakly.
WATCHED: dict[int, Watch] = {}
_room = MANY
_MODELS = weakref.WeakSet[torch.nn.Module]()  # whose parameters may be parts of one file


def watch_of(weight: Tensor) -> Watch:
    """Return what watches over the storage of ``weight``, from now on."""
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
    for key, watch in list(WATCHED.items()):  # in place, for another thread may add some
        if watch.is_gone():
            WATCHED.pop(key, None)
    _room = max(MANY, 2 * len(WATCHED))


def were_written(tensors: Iterable[Tensor]) -> None:
    """Take note that kernels that move no version counter have written ``tensors``."""
    for tensor in tensors:
        watch = WATCHED.get(storage_key(tensor) or 0)
        if watch is not None:
            watch.was_written()


def handed_out(tensor: Tensor) -> None:
    """Take note that somebody has got the memory of ``tensor``; of any tensor, and as fast as that can be."""
    try:
        watch = WATCHED.get(storage_id(tensor))
    except (RuntimeError, NotImplementedError, TypeError):  # it has no storage
        return
    if watch is not None:
        watch.was_handed_out()


def forget_addresses(weights: Iterable[Tensor]) -> None:
    """Take the user's word that nobody writes by an address of ``weights`` any more."""
    for weight in weights:
        watch = WATCHED.get(storage_key(weight) or 0)
        if watch is not None:
            watch.address = False


# -- who has the memory -------------------------------------------------------------------------------


_SOLE = storage_holders(torch.empty(1))  # what is counted of memory that one tensor has


def _why_held(weight: Tensor) -> str:
    """Say why the memory of ``weight`` may have another reader or writer than ``weight``, or ""."""
    if storage_holders(weight) != _SOLE:
        return HELD
    storage = storage_of(weight)
    if storage.device.type == "cpu" and (storage.is_shared() or not _is_own(storage)):
        return OTHERS
    return ""


def _is_own(storage: torch.UntypedStorage) -> bool:
    """Say whether ``storage`` has its memory alone: allocated for it, or its parts of a file that nobody else has."""
    if storage.resizable():
        return True
    owner = memory_owner(storage)
    return owner is True or (owner is not False and _are_all_parts_ours(owner) and is_private_mapping(storage))


def look_at_parts_of(model: torch.nn.Module) -> None:
    """Have the parameters of ``model`` counted where they lie in a file together, as safetensors maps it."""
    _MODELS.add(model)


_counted: dict[int, tuple[tuple[int, int], bool]] = {}


def _are_all_parts_ours(file: int) -> bool:
    """Say whether the parts of a mapped ``file`` that exist are the tensors of converted models, and no others."""
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

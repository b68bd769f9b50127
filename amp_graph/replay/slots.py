"""One recorded forward with its backward, and the memory that both own: a slot.

Before: a forward whose saved values autograd owns. After: saved values in a slot, which no other forward may use until
the backward of this one has run, or can no longer run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.operators import foreach_copy_
from amp_graph.passes.torch_compat.storage import address_of, bytes_of, storage_key
from amp_graph.replay.eligibility import why_not_flat
from amp_graph.replay.flat_graph import Pattern
from amp_graph.replay.recorder import CannotRecord, CudaRecorder, Replay, Results
from amp_graph.replay.trace_flat import FlatGraphs, pattern_of

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(eq=False)
class RecordedBackward:
    """The recording of a backward, for gradients of one layout."""

    replay: Replay
    seeds: list[Tensor]
    results: Results


@dataclass(eq=False)
class Slot:
    """Recordings of one captured graph, for arguments of one kind at known addresses.

    static: the arguments as the recordings read them: copies of what the caller passes (``by_copy``), and the model's
    own tensors, by address. holder: the call that waits for its backward.
    """

    graphs: FlatGraphs
    recorder: CudaRecorder
    by_copy: tuple[int, ...]
    static: list[Any]
    addresses: tuple[tuple[int, ...], list[int]]  # the numbers of those arguments, and where they lie
    replay: Replay
    results: Results
    wrap: Wrap
    backwards: dict[Pattern, RecordedBackward | None] = field(default_factory=dict)
    holder: weakref.ref[Any] | None = None

    @staticmethod
    def recorded(
        graphs: FlatGraphs, args: Sequence[Any], by_copy: Sequence[int], recorder: CudaRecorder, wrap: Wrap
    ) -> Slot:
        """Record forward; raises CannotRecord."""
        static = [a.detach() if isinstance(a, Tensor) else a for a in args]
        for i in by_copy:
            static[i] = copied(static[i])
        flat = graphs.flat
        replay, results = recorder.record(wrap(flat.run_forward), [static[i] for i in flat.tensors])
        copies = set(by_copy)
        by_address = tuple(i for i in flat.tensors if i not in copies)
        addresses = by_address, addresses_of(args, by_address)
        return Slot(graphs, recorder, tuple(by_copy), static, addresses, replay, results, wrap)

    def is_for(self, args: Sequence[Any]) -> bool:
        """Say whether the model's own tensors lie where they were recorded."""
        numbers, places = self.addresses
        return addresses_of(args, numbers) == places

    @property
    def is_free(self) -> bool:
        """Whether no call waits for its backward."""
        return self.holder is None or self.holder() is None

    def forward(self, args: Sequence[Any]) -> list[Tensor]:
        """Replay forward on ``args``; return copies of the new tensors."""
        flat = self.graphs.flat
        for i in self.by_copy:
            fill(self.static[i], args[i])
        self.replay()
        for i in flat.written - flat.uncounted:
            if not args[i].is_inference():
                torch.autograd.graph.increment_version(args[i])
        return copies(self.results[: flat.made])

    def backward(self, given: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Replay backward; return copies of the gradients, or None if it is not recorded. Raises CannotRecord."""
        pattern = pattern_of(given)
        if pattern not in self.backwards:
            self.backwards[pattern] = None  # if recording fails
            self.backwards[pattern] = self._record_backward(given)
        recorded = self.backwards[pattern]
        if recorded is None:
            return None
        for seed, grad in zip(recorded.seeds, (g for g in given if g is not None), strict=True):
            fill(seed, grad)
        recorded.replay()
        return copies(recorded.results)

    def _record_backward(self, given: Sequence[Tensor | None]) -> RecordedBackward | None:
        found = self.graphs.backward(given)
        if found is None:
            return None
        flat, run = found
        if why := why_not_flat(flat, self.static, self.by_copy):
            raise CannotRecord(why)
        seeds = [twin_of(g) for g in given if g is not None]
        kept = [self.static[i] for i in self.graphs.flat.kept]
        replay, results = self.recorder.record(self.wrap(run), [*kept, *self.saved, *seeds])
        return RecordedBackward(replay, seeds, results)

    @property
    def saved(self) -> list[Any]:
        """The values of forward that backward reads."""
        return self.results[self.graphs.flat.made :]

    def unrecorded_backward(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run backward on what the recorded forward saved, which stays as it is; raises CannotRecord."""
        found = self.graphs.backward(given)
        if found is None:
            return [None for _ in self.graphs.flat.routes]
        grads = found[1](*kept, *self.saved, *(g for g in given if g is not None))
        own = {storage_key(t) for t in self.saved if isinstance(t, Tensor)}
        return [copied(g) if g is not None and storage_key(g) in own else g for g in grads]

    @property
    def bytes(self) -> int:
        """The bytes of all memory that the slot holds and Python can see."""
        found = [self.static[i] for i in self.by_copy] + self.results
        for recorded in self.backwards.values():
            found += [*recorded.seeds, *recorded.results] if recorded else []
        own = {storage_key(a) for i, a in enumerate(self.static) if isinstance(a, Tensor) and i not in self.by_copy}
        sizes = {storage_key(t): bytes_of(t) for t in found if isinstance(t, Tensor)}  # shared memory once
        return sum(size for key, size in sizes.items() if key not in own)


def addresses_of(args: Sequence[Any], numbers: Sequence[int]) -> list[int]:
    """Return the addresses of the arguments of these numbers."""
    return [address_of(args[i]) for i in numbers]


def twin_of(tensor: Tensor) -> Tensor:
    """Return new memory with the sizes and strides of ``tensor``, which may be expanded."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def fill(twin: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``twin``."""
    _unexpanded(twin).copy_(_unexpanded(source))


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides."""
    made = twin_of(tensor)
    fill(made, tensor)
    return made


def copies(tensors: Sequence[Any]) -> list[Any]:
    """Return a copy of each tensor, each in memory of its own, with the same strides; None stays None.

    One call of torch copies all of one dtype, because a call for each would take the host longer than the kernels run.
    """
    found = []
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if tensor is None or not _is_dense(tensor):
            found.append(None if tensor is None else copied(tensor))
            continue
        made = torch.empty_like(tensor)
        targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
        targets.append(made)
        sources.append(tensor)
        found.append(made)
    for targets, sources in by_dtype.values():
        foreach_copy_(targets, sources)
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the elements of ``tensor`` fill their memory, in any order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with one element along each expanded dimension: the others are the same memory."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

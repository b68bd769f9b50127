"""Decides, call by call, whether a captured graph runs as it is, is recorded, or is replayed.

The first calls of each kind of arguments (``key_of``) run as they are: they are the warm-up, and show whether the
user's loop does what a recording cannot. The fourth is recorded. Two forwards may wait for their backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.lists.errors import Attempt, first_line
from amp_graph.passes.graph.fake_values import has_symbols
from amp_graph.passes.torch_compat.autograd import what_watches_calls
from amp_graph.passes.torch_compat.devices import kernel_settings, stream_of
from amp_graph.replay.eligibility import why_not_captured, why_not_with_ranks
from amp_graph.replay.recorder import RECORDERS, CannotRecord
from amp_graph.replay.replayed_call import ReplayedCall
from amp_graph.replay.slots import Slot

if TYPE_CHECKING:
    from amp_graph.replay.replays import Replays

WARM_UP = 3  # calls of a kind that run as they are
SLOTS = 2  # forwards of a kind that may wait for their backwards
MOST = 8  # recordings of a graph
MOVES = 3  # recordings that are made anew because parameters moved
KINDS = 64  # kinds of arguments that are counted
Key = tuple[Any, ...]


@dataclass(eq=False)
class Entry:
    """Calls with arguments of one kind."""

    calls: int = 0
    moves: int = 0
    why: str = ""  # why it is not recorded
    slots: list[Slot] = field(default_factory=list)

    def decline(self, why: str) -> None:
        """Run calls of this kind as they are from now on."""
        self.why = self.why or why
        self.slots = [slot for slot in self.slots if not slot.is_free]


class GuardSet:
    """One captured graph: ``run`` runs it as it is; ``recorded`` is what is recorded."""

    def __init__(
        self, replays: Replays, gm: GraphModule, run: Callable[..., Any], recorded: Callable[..., Any], why: str
    ) -> None:
        """Nothing is recorded yet, and nothing ever where ``why`` says so."""
        self.replays, self.gm, self.run, self.recorded, self.why = replays, gm, run, recorded, why
        self.entries: dict[Key, Entry] = {}
        # The arguments that make a kind. Dynamo's guards fix those of the model, unless sizes are symbolic: None, all.
        self._keyed: list[int] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run one call."""
        if self.why or what_watches_calls() or not self.replays.lock.acquire(blocking=False):
            return self.run(*args)
        try:
            return self._decide(args)
        finally:
            self.replays.lock.release()

    def _decide(self, args: Sequence[Any]) -> Any:
        entry = self._entry(args)
        if entry is None or entry.why:
            return self.run(*args)
        entry.calls += 1
        if entry.calls <= WARM_UP:
            return self._warm_up(entry, args)
        slot = self._slot(entry, args)
        if slot is None:
            return self.run(*args)
        with torch.no_grad():
            found: Sequence[Tensor] = slot.forward(args)
        if slot.routes:
            found = ReplayedCall(self.replays.lock, entry, slot).connected(found, args)
        return slot.arranged(found, args)

    def _entry(self, args: Sequence[Any]) -> Entry | None:
        """Return the entry of a call; None where none of its kind is counted."""
        if not self.entries:
            self.why = why_not_captured(self.gm, args)
            if self.why:
                return None
            if not has_symbols(self.gm):
                own = self.replays.own_tensors()
                self._keyed = [i for i, a in enumerate(args) if id(a) not in own]
        try:
            key = key_of(args if self._keyed is None else [args[i] for i in self._keyed])
            stream = next((stream_of(a) for a in args if isinstance(a, Tensor)), 0)  # streams run at the same time
            key = (*key, stream, *kernel_settings())
            found = self.entries.get(key)
        except (RuntimeError, TypeError) as error:  # a tensor without strides, an argument without a hash
            self.why = f"an input is no ordinary tensor or number: {first_line(error)}"
            return None
        if found is None and len(self.entries) < KINDS:
            found = self.entries[key] = Entry()
        return found

    def _warm_up(self, entry: Entry, args: Sequence[Any]) -> Any:
        """Run a call as it is, and see whether its backward is differentiated again."""
        results = self.run(*args)

        def look(_: Tensor) -> None:
            if torch.is_grad_enabled():
                entry.decline("its backward is differentiated again (create_graph=True)")

        for result in results if torch.is_grad_enabled() else ():
            if isinstance(result, Tensor) and result.grad_fn is not None:
                result.register_hook(look)
        return results

    def _slot(self, entry: Entry, args: Sequence[Any]) -> Slot | None:
        """Return a slot for a call, recorded now if need be; None if the call has to run as it is."""
        free = [slot for slot in entry.slots if slot.is_free]
        for slot in free:
            if slot.is_for(args):
                return slot
        if free:
            entry.moves += 1
            entry.slots = [slot for slot in entry.slots if slot not in free]
            if entry.moves > MOVES:
                entry.decline("its parameters or buffers move from call to call")
                return None
        count = sum(len(one.slots) for one in self.entries.values())
        if len(entry.slots) >= SLOTS or count >= MOST:
            return None
        with Attempt() as tried:
            entry.slots.append(self._recorded(args))
            return entry.slots[-1]
        assert tried.error is not None, "else a slot was returned"
        entry.decline(first_line(tried.error) if isinstance(tried.error, CannotRecord) else tried.reason)
        return None

    def _recorded(self, args: Sequence[Any]) -> Slot:
        """Record a call; raises CannotRecord, and errors of torch."""
        if why := why_not_with_ranks(self.replays.model):
            raise CannotRecord(why)
        devices = {a.device for a in args if isinstance(a, Tensor)}
        if len(devices) != 1:
            raise CannotRecord(f"its inputs are on {' and '.join(sorted(map(str, devices))) or 'no device'}")
        own, (device,) = self.replays.own_tensors(), devices
        by_copy = [i for i, a in enumerate(args) if isinstance(a, Tensor) and id(a) not in own]
        return Slot(self.recorded, args, by_copy, RECORDERS[device.type](device))


def key_of(args: Sequence[Any]) -> Key:
    """Return what a recording depends on: sizes, strides, dtypes, devices, who has a gradient, and all numbers."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *[
        (a.shape, a.stride(), a.dtype, a.device, a.requires_grad) if isinstance(a, Tensor) else a for a in args
    ]  # fmt: skip

"""One replayed forward that waits for its backward: replays that, or finds another right way to its gradients.

Before: autograd asks for the gradients of a call. After: the recorded backward has run; or, where it must not (a graph
that is kept, a second derivative, moved parameters), the same operations one by one, or the whole call once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import is_plain, keeps_graph
from amp_graph.replay.eligibility import why_no_second_order
from amp_graph.replay.flat_call import FlatGraphs
from amp_graph.replay.flat_graph import CannotBeFlat, Flat
from amp_graph.replay.recorder import CannotRecord
from amp_graph.replay.second_run import SecondRun
from amp_graph.replay.slots import Slot
from amp_graph.replay.taped_graphs import TapedGraphs

if TYPE_CHECKING:
    from amp_graph.replay.guard_set import Entry, GuardSet

OVERWRITTEN = (
    "amp_graph: the values that this backward needs belong to forward {} of a recorded graph, and a later forward, or "
    "an earlier backward, has overwritten them\n"
    "  legal: one backward for each forward, or retain_graph=True in all but the last of them\n"
    "  fix:   the policy word replay=false"
)
DIFFERENTIATED = (
    "amp_graph: create_graph=True in the backward of a recorded graph, which cannot run again for it: {}\n"
    "  fix:   the policy word replay=false, or create_graph=True from the first call on: the graph is then not recorded"
)


class ReplayedCall:
    """The arguments of one replayed forward, and the slot that has its saved values."""

    def __init__(self, owner: GuardSet, entry: Entry, slot: Slot, args: Sequence[Any]) -> None:
        """Take the slot; called before forward is replayed, as the random state is kept."""
        self.owner, self.entry, self.slot, self.args = owner, entry, slot, tuple(args)
        self.number = owner.replays.count_forward()
        self._versions = self._versions_now()
        self._random = _random_state(args, self.flat) if self.flat.draws else None
        self._is_over = False
        self._second: SecondRun | None = None

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        return self.graphs.flat

    @property
    def graphs(self) -> FlatGraphs | TapedGraphs:
        """The traces of the call."""
        return self.slot.graphs

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None], node: Any) -> Sequence[Tensor | None]:
        """Return the gradient of each route."""
        with self.owner.replays.lock:
            if not self.is_current():
                raise RuntimeError(OVERWRITTEN.format(self.number))
            if is_plain(*given):
                self.entry.decline("its backward is differentiated again, or batched")
                return self._again(given, node)
            try:
                return self._together(given) or self._once(kept, given)
            except CannotBeFlat as error:
                self.entry.decline(str(error))
                return self._again(given, node)

    def is_current(self) -> bool:
        """Say whether the slot still holds the values of this call."""
        holder = self.slot.holder
        return not self._is_over and holder is not None and holder() is self

    def _once(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if keeps_graph():
            return self.slot.unrecorded_backward(kept, given)
        found = None
        if self.slot.is_for(self.args):
            try:
                found = self.slot.backward(given)
            except CannotRecord as error:
                self.entry.decline(f"backward: {error}")
        if found is None:
            found = self.slot.unrecorded_backward(kept, given)
            self.slot.free()
        self._end()
        return found

    def _end(self) -> None:
        """Hold nothing any more."""
        self._is_over, self.args, self._second = True, (), None

    # -- once more ------------------------------------------------------------------------------------

    def _again(self, given: Sequence[Tensor | None], node: Any) -> Sequence[Tensor | None]:
        """Run the call once more under autograd, and differentiate that."""
        if self._second is None:
            if why := next(why_no_second_order(self.flat), ""):
                raise RuntimeError(DIFFERENTIATED.format(why))
            if self._versions != self._versions_now():
                raise RuntimeError(DIFFERENTIATED.format("one of its inputs has been modified by an inplace operation"))
            with self._random_state_of_forward():
                self._second = SecondRun(self.owner.run, self.flat, self.args)
        return self._second.gradients(given, node)

    def _together(self, given: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Return the gradients with those that a second derivative has left to this call; None if there are none."""
        found = None if self._second is None else self._second.together(given)
        if found is not None and not keeps_graph():
            self.slot.free()
            self._end()
        return found

    def _versions_now(self) -> list[int]:
        args = self.args
        return [a._version for a in [args[i] for i in self.flat.unwritten] if not a.is_inference()]

    @contextlib.contextmanager
    def _random_state_of_forward(self) -> Iterator[None]:
        if self._random is None:
            yield
            return
        device, state = self._random
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)
            yield


def _random_state(args: Sequence[Any], flat: Flat) -> tuple[torch.device, Tensor]:
    """Return the device and the state of its generator; nothing waits for the device."""
    device = args[flat.tensors[0]].device
    return device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

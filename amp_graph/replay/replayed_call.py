"""One replayed forward that waits for its backward: replays that, or runs the same operations one by one.

Before: autograd asks for the gradients of a call. After: the recorded backward has run; or, where it must not (a graph
that is kept, moved parameters), the same operations one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import is_plain, keeps_graph
from amp_graph.replay.flat_graph import Flat
from amp_graph.replay.recorder import CannotRecord
from amp_graph.replay.slots import Slot

if TYPE_CHECKING:
    from amp_graph.replay.guard_set import Entry

OVERWRITTEN = (
    "amp_graph: the values that this backward needs belong to a forward of a recorded graph, and a later forward, or "
    "an earlier backward, has overwritten them\n"
    "  legal: one backward for each forward, or retain_graph=True in all but the last of them\n"
    "  fix:   the policy word replay=false"
)
DIFFERENTIATED = (
    "amp_graph: create_graph=True, or batched gradients, in the backward of a recorded graph, which has none of its "
    "own\n"
    "  fix:   the policy word replay=false, or create_graph=True from the first call on: the graph is then not recorded"
)


class ReplayedCall:
    """The arguments of one replayed forward, and the slot that has its saved values."""

    def __init__(self, lock: threading.RLock, entry: Entry, slot: Slot, args: Sequence[Any]) -> None:
        """Take the slot."""
        self.entry, self.slot, self.args, self._lock = entry, slot, tuple(args), lock
        self._is_over = False

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        return self.slot.graphs.flat

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradient of each route, from the arguments that backward reads and the outputs' gradients."""
        with self._lock:
            if not self.is_current():
                raise RuntimeError(OVERWRITTEN)
            if is_plain(*given):
                self.entry.decline("its backward is differentiated again, or batched")
                raise RuntimeError(DIFFERENTIATED)
            if keeps_graph():
                return self.slot.unrecorded_backward(kept, given)
            found = self._replayed(given)
            if found is None:
                found = self.slot.unrecorded_backward(kept, given)
            self.slot.holder = None
            self._is_over, self.args = True, ()
            return found

    def is_current(self) -> bool:
        """Say whether the slot still holds the values of this call."""
        holder = self.slot.holder
        return not self._is_over and holder is not None and holder() is self

    def _replayed(self, given: Sequence[Tensor | None]) -> Sequence[Tensor | None] | None:
        """Replay the recorded backward; None if there is none."""
        if not self.slot.is_for(self.args):
            return None
        try:
            return self.slot.backward(given)
        except CannotRecord as error:
            self.entry.decline(f"backward: {error}")
            return None


def outputs_of(call: ReplayedCall, results: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of the captured graph, from the new tensors ``results`` and its arguments."""
    flat = call.flat
    if flat.backward is None:
        return arranged(flat, results, args)
    made: Any = _Behind.apply(call, results, [args[i] for i in flat.kept], *(args[i] for i in flat.routes))
    return arranged(flat, made, args)


def arranged(flat: Flat, new: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
    """Return the outputs in the captured graph's order."""
    return [new[o.place] if o.place is not None else args[o.passed] if o.passed is not None else o.constant
            for o in flat.outputs]  # fmt: skip


class _Behind(torch.autograd.Function):
    """Connects results that exist already to the backward of their call."""

    @staticmethod
    def forward(ctx: Any, call: ReplayedCall, results: Sequence[Tensor], kept: Sequence[Tensor], *edges: Tensor) -> Any:
        """Return the results."""
        differentiable = set(call.flat.with_gradient)
        ctx.call = call
        ctx.places = call.flat.with_gradient
        # Autograd checks that what it saves is not modified; statistics may be updated in the meantime.
        loose = [n for n, i in enumerate(call.flat.kept) if i in call.flat.uncounted]
        ctx.loose = {n: kept[n] for n in loose}
        ctx.save_for_backward(*(t for n, t in enumerate(kept) if n not in ctx.loose))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for place, r in enumerate(results) if place not in differentiable))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the edges."""
        given = [grads[place] for place in ctx.places]
        kept = list(ctx.saved_tensors)
        for n, tensor in ctx.loose.items():  # in order
            kept.insert(n, tensor)
        found = ctx.call.gradients(kept, given)
        return None, None, None, *found

"""One replayed forward that waits for its backward: replays that, or runs the same operations one by one.

Before: autograd asks for the gradients of a call. After: the recorded backward has run; or, where it must not, as the
graph is kept, the same operations one by one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import is_plain, keeps_graph
from amp_graph.replay.recorder import CannotRecord
from amp_graph.replay.slots import Gradients, Slot

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
    """One replayed forward, and the slot that has its saved values."""

    def __init__(self, lock: threading.RLock, entry: Entry, slot: Slot) -> None:
        """Take the slot."""
        self.entry, self.slot, self._lock = entry, slot, lock
        slot.holder = weakref.ref(self)
        self._is_over = False

    def gradients(self, given: Gradients) -> Gradients:
        """Return the gradient of each route, from the outputs' gradients."""
        with self._lock:
            if not self.is_current():
                raise RuntimeError(OVERWRITTEN)
            if is_plain(*given):
                self.entry.decline("its backward is differentiated again, or batched")
                raise RuntimeError(DIFFERENTIATED)
            if keeps_graph():
                return self.slot.unrecorded_backward(given)
            found = None
            try:
                found = self.slot.backward(given)
            except CannotRecord as error:
                self.entry.decline(f"backward: {error}")
            if found is None:
                found = self.slot.unrecorded_backward(given)
            self.slot.holder, self._is_over = None, True
            return found

    def is_current(self) -> bool:
        """Say whether the slot still holds the values of this call."""
        holder = self.slot.holder
        return not self._is_over and holder is not None and holder() is self

    def connected(self, results: Sequence[Tensor], args: Sequence[Any]) -> Any:
        """Return the new tensors ``results``, from which autograd goes on to those of ``args`` that get gradients."""
        slot = self.slot
        return _Behind.apply(self, results, [args[i] for i in slot.kept], *(args[i] for i in slot.routes))


class _Behind(torch.autograd.Function):
    """Connects results that exist already to the backward of their call."""

    @staticmethod
    def forward(ctx: Any, call: ReplayedCall, results: Sequence[Tensor], kept: Sequence[Tensor], *edges: Tensor) -> Any:
        """Return the results."""
        ctx.call, trained = call, call.slot.trained
        ctx.save_for_backward(*kept)  # autograd checks that what was saved is not modified
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for n, r in enumerate(results) if n not in trained))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the edges."""
        _ = ctx.saved_tensors
        return None, None, None, *ctx.call.gradients([grads[n] for n in ctx.call.slot.trained])

"""One replayed forward that waits for its backward: replays that, or finds another right way to its gradients.

Before: autograd asks for the gradients of a call. After: the recorded backward has run; or, where it must not (a graph
that is kept, a second derivative, moved parameters), the same operations one by one, or the whole call once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import is_plain, keeps_graph
from amp_graph.replay.eligibility import why_no_second_order
from amp_graph.replay.flat_call import FlatGraphs, TapedGraphs
from amp_graph.replay.flat_graph import CannotBeFlat, Flat
from amp_graph.replay.recorder import CannotRecord
from amp_graph.replay.slots import Slot

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

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        return self.graphs.flat

    @property
    def graphs(self) -> FlatGraphs | TapedGraphs:
        """The traces of the call."""
        return self.slot.graphs

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradient of each route."""
        with self.owner.replays.lock:
            if not self.is_current():
                raise RuntimeError(OVERWRITTEN.format(self.number))
            if is_plain(*given):
                self.entry.decline("its backward is differentiated again, or batched")
                return self._again(given)
            try:
                return self._once(kept, given)
            except CannotBeFlat as error:
                self.entry.decline(str(error))
                return self._again(given)

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
        self._is_over, self.args = True, ()

    # -- once more ------------------------------------------------------------------------------------

    def _again(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the call once more under autograd, and return the gradient of each route, to be differentiated again.

        What is differentiated are aliases of the arguments: a gradient that comes through the history of an argument
        belongs to the graph around. What the call writes to is copied first.
        """
        flat = self.flat
        if why := next(why_no_second_order(flat), ""):
            raise RuntimeError(DIFFERENTIATED.format(why))
        if self._versions != self._versions_now():
            raise RuntimeError(DIFFERENTIATED.format("one of its inputs has been modified by an inplace operation"))
        with self._random_state_of_forward(), torch.enable_grad():
            aliases = {i: self.args[i].view_as(self.args[i]) for i in flat.routes}
            args = [a.clone() if i in flat.written else aliases.get(i, a) for i, a in enumerate(self.args)]
            results = self.owner.run(*args)
        outs = {o.place: r for o, r in zip(flat.outputs, results, strict=True) if o.place is not None}
        pairs = [(outs[place], g) for place, g in zip(flat.with_gradient, given, strict=True) if g is not None]
        if not pairs:
            return [None for _ in flat.routes]
        ends, grads, differentiable = [out for out, _ in pairs], [g for _, g in pairs], torch.is_grad_enabled()
        made = torch.autograd.grad(ends, [*aliases.values()], grads, create_graph=differentiable, allow_unused=True)
        left = dict(zip(aliases, made, strict=True))
        return [left.pop(i, None) for i in flat.routes]  # the whole sum at the first edge of each argument

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


class Call(Protocol):
    """One call whose backward has not run yet."""

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        ...

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradient for each route of ``flat``.

        kept: the arguments that backward reads. given: the gradients of the outputs that have one.
        """
        ...


def outputs_of(call: Call, results: Sequence[Tensor], args: Sequence[Any]) -> list[Any]:
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
    def forward(ctx: Any, call: Call, results: Sequence[Tensor], kept: Sequence[Tensor], *edges: Tensor) -> Any:
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

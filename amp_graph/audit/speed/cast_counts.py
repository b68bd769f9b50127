"""AMP7xx: casts that are made again, undone, or needed only because of what runs between them.

Before: a weight is cast to bfloat16 in each of ten steps of a loop, as each enters a region of its own. After: AMP701
at the region, with the bytes, and their part of what the step moves.

A value is its memory, its version and its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from amp_graph.audit.codes import finding
from amp_graph.audit.records import (
    CONVERSION,
    FULL,
    LOW,
    Call,
    Event,
    Finding,
    Place,
    Tally,
    Totals,
    Watcher,
    tensors_in,
)
from amp_graph.audit.speed.predicted_time import LEAST_SHARE, family_of, seconds_of, seconds_of_steps
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.storage import Memory, storage_key

LARGE_SHARE = 0.1  # of the bytes or the predicted time of the looked-at steps: such casts are worth a warning
ALWAYS_NOTES = ("AMP705", "AMP706")  # autocast works so, and a script cannot mend it without another forward
TEXTS = {
    "AMP701": (
        "weights are cast to low precision again, as autocast is entered anew {times:g} times a step before one "
        "backward",
        "enter the region once around all of these calls: what autocast has cast is kept until it ends",
    ),
    "AMP702": ("a value that was cast already is cast to the same dtype again", "cast it once, and keep the result"),
    "AMP703": (
        "a low value is cast up here, and then back to what it was",
        "drop both casts: the value before them is the same",
    ),
    "AMP704": (
        "low values are cast up for an operation that runs in full precision under autocast, and its result down again",
        "if the operation may run low, write it so that it does; else keep its neighbors in full precision, too",
    ),
    "AMP705": (
        "weights that did not change are cast again for each micro-batch",
        "cast them once: fewer and larger micro-batches, or amp_graph.TrainStep where low precision pays, see the plan",
    ),
    "AMP706": (
        "autocast casts one activation once for each product that reads it",
        "cast it once: by one product in place of several, such as a fused query-key-value",
    ),
    "AMP707": (
        "weights that are never trained are cast again in every step",
        "keep them low: module.to(torch.bfloat16), or amp_graph.freeze(module)",
    ),
}


class Widened(NamedTuple):
    """What a cast up wrote, or what ran in full precision on it: the cast, and its call of torch."""

    version: int
    dtype: str  # low, before the cast
    call: Call
    group: int
    operation: Place | None  # that autocast cast up for; None of the cast's own result


@dataclass(eq=False)
class CastCounts(Watcher):
    """Follows each cast value through a step."""

    repeats: dict[tuple[str, Place, str], Tally] = field(default_factory=dict)  # by code, place and who cast
    _backwards: int = 0
    _device: str = "cpu"
    # How many backwards had run at the last cast of a value to a dtype, and the entry of the outermost region.
    _casts: Memory[tuple[int, list[tuple[int, int]]]] = field(default_factory=Memory)
    _widened: Memory[Widened] = field(default_factory=Memory)
    _again: list[tuple[Call, int, int, bool]] = field(default_factory=list)  # by whom is not known yet
    _frozen: Memory[int] = field(default_factory=Memory)  # in all steps; bytes not yet counted

    def began(self) -> None:
        """Forget the values of other steps."""
        self._decide(by_autocast=False)
        self._casts.clear()
        self._widened.clear()

    def heard(self, event: Event) -> None:
        """Count the backward passes."""
        self._backwards += event.name == "backward" and not event.is_after

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow a cast, or an operation on what was cast."""
        if call.phase != "forward" or in_backward():  # a checkpoint computes again what it did not keep
            return
        if call.operator == CONVERSION and call.inputs and call.output not in ("", call.inputs[0]):
            self._cast(call, args[0], result)
        else:
            self._decide(by_autocast=True)
            self._computed(call, tensors_in((args, kwargs)), tensors_in(result))

    def findings(self) -> Iterator[Finding]:
        """Yield the casts that could be left out, by line."""
        self._decide(by_autocast=False)
        machine = machine_for(self._device)
        counted = {c: t for c, t in self.training.calls.items() if c.phase != "update" and family_of(c.operator)}
        all_bytes = max(1, sum(t.bytes for t in counted.values()))
        all_seconds = max(seconds_of_steps(counted, machine), 1e-30)
        for (code, place, library), repeat in self.repeats.items():
            size = repeat.counts["bytes"]
            totals = Totals(repeat.counts["calls"], bytes=size)
            share, of_time = size / all_bytes, seconds_of(repeat.call, totals, machine) / all_seconds
            if max(share, of_time) < LEAST_SHARE:
                continue
            large = max(share, of_time) > LARGE_SHARE and code not in ALWAYS_NOTES
            what, fix = TEXTS[code]
            entered = sum(one.looked_at for one in self.training.regions if one.place == place)
            count = repeat.counts["calls"] / self.training.looks
            by = f", in {library}, called from this line" if library else ""
            yield finding(
                code, place,
                f"{what.format(times=entered / self.training.looks)}{by}: casts a step beyond what is needed: "
                f"{count:g}, {size / self.training.looks / 1e6:.3g} MB, {share:.1%} of the bytes that operations of a "
                f"step move, predicted {of_time:.1%} of the step's time on {machine.name}",
                fix,
                level="warning" if large else "note", also=sorted(filter(None, repeat.modules)), casts=count,
                library=library, bytes=size / self.training.looks, share_of_bytes=share, share_of_time=of_time,
                machine=machine.name,
            )  # fmt: skip

    # -- casts ----------------------------------------------------------------------------------------

    def _cast(self, call: Call, value: Tensor, result: Tensor) -> None:
        if storage_key(value) is None or value.is_inference():
            return
        self._device = value.device.type
        moved = value.nbytes + result.nbytes
        if call.output in LOW:
            self._undone(call, value, moved)
        elif call.inputs[0] in LOW and call.output in FULL:
            self._widen(result, call, None, call.inputs[0])
        part = value._version, value.storage_offset(), *value.shape, *value.stride(), call.output
        # Autocast holds its casts of weights until the outermost region ends.
        entry = [(number, self.training.regions[number].entered) for number in self.training.open[:1]]
        made, last = (self._backwards, entry), self._casts.known(value, *part)
        self._casts.keep(value, made, *part)
        is_trained = self.training.weights.known(value)  # None of an activation
        if is_trained is False:  # all casts of it count, once there are several
            before = self._frozen.known(value, *part)
            self._frozen.keep(value, moved if before is None else 0, *part)
            for size in () if before is None else filter(None, (before, moved)):
                self._repeat("AMP707", call.place, call, size)
        elif last is None:
            return
        elif is_trained and last[0] != made[0]:
            self._repeat("AMP705", self._place(call), call, moved)
        elif is_trained and last[1] != made[1] and self.training.open:
            self._repeat("AMP701", self._place(call), call, moved)
        else:
            self._again.append((call, moved, self.training.group, bool(is_trained)))

    def _place(self, call: Call) -> Place:
        return self.training.regions[self.training.open[0]].place if self.training.open else call.place

    def _decide(self, *, by_autocast: bool) -> None:
        """Count what was cast again: the present operation reads it, if they are of one call of torch."""
        for call, moved, group, is_weight in self._again:
            mine = by_autocast and group == self.training.group and call.region >= 0
            code = "AMP706" if mine and not is_weight else "AMP702"
            self._repeat(code, call.place, call, moved, library="" if mine else call.library)
        self._again.clear()

    def _repeat(self, code: str, place: Place, call: Call, moved: int, *, library: str = "") -> None:
        self.repeats.setdefault((code, place, library), Tally(call)).add(call, calls=1, bytes=moved)

    # -- between casts --------------------------------------------------------------------------------

    def _widen(self, wide: Tensor, call: Call, operation: Place | None, dtype: str) -> None:
        if not wide.is_inference():
            self._widened.keep(wide, Widened(wide._version, dtype, call, self.training.group, operation))

    def _undone(self, call: Call, value: Tensor, moved: int) -> None:
        """Count a cast down of what was cast up: of the same value, or of what autocast cast it up for."""
        wide = self._widened.known(value)
        if wide is None or wide.dtype != call.output:
            return
        if wide.operation is not None:
            self._repeat("AMP704", wide.operation, call, 2 * moved)
        elif wide.version == value._version:
            self._repeat("AMP703", wide.call.place, call, 2 * moved, library=wide.call.library)

    def _computed(self, call: Call, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Mark what an operation makes of values that autocast cast up for it, and what else is made of that alone."""
        if not self._widened or call.output != "float32":
            return
        wide = {storage_key(t): one for t in given if (one := self._widened.known(t)) is not None}
        alone = len(call.inputs) == 1
        for one in wide.values():
            first = one.operation is None and one.group == self.training.group and call.region >= 0
            if first or (one.operation is not None and alone):
                for t in made:
                    if t.is_floating_point() and storage_key(t) not in wide:  # no view, and not in place
                        self._widen(t, call, one.operation or call.place, one.dtype)

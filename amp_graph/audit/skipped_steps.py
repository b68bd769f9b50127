"""AMP206, AMP207, AMP210, AMP211: what became of the scale, and which steps were skipped, and why.

A step was skipped if ``scaler.step`` returned and the optimizer was not called; for a fused optimizer, which is called
and decides on the device, if the scale fell. The host reads a scale in looked-at steps alone.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from amp_graph.audit.codes import finding
from amp_graph.audit.first_overflow import FirstOverflow, Origin
from amp_graph.audit.records import Call, Event, Finding, Place, Watcher
from amp_graph.audit.scaler_use import dtypes_seen, steps_text

IN_A_ROW = 3  # skipped steps at the end of a run, from which on the scale only falls
ADAPTS = 128.0  # scales from here on may still be too high, in a run that has only begun
SMALL = 16.0  # scales up to here hardly move gradients away from underflow
LONG = 2000  # torch's growth interval
OFTEN = 0.1  # the part of steps that are skipped, from which on a schedule is ahead by much


@dataclass
class History:
    """The scaled steps of an optimizer: how many, which were skipped, and the scales that were read."""

    place: Place
    interval: int
    steps: int = 0
    skipped: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    @property
    def in_a_row(self) -> int:
        """How many of the last steps were skipped."""
        last = enumerate(reversed(self.skipped))
        return next((n for n, step in last if step != self.steps - n), len(self.skipped))


@dataclass(eq=False)
class SkippedSteps(Watcher):
    """Counts the skipped steps of each optimizer, and looks for the operation that made them so."""

    _known: weakref.WeakKeyDictionary[Optimizer, History] = field(default_factory=weakref.WeakKeyDictionary)
    _histories: list[History] = field(default_factory=list)
    _stepped: list[History] = field(default_factory=list)  # since the last update of a scaler
    _before: int = 0  # optimizers' updates, when a scaler's step began
    _scale: float = 0.0  # then, in a looked-at step
    _ahead: Counter[Place] = field(default_factory=Counter)  # a scheduler's steps after skipped ones
    _scheduled: Counter[Place] = field(default_factory=Counter)
    _overflow: FirstOverflow = field(default_factory=FirstOverflow)
    _origins: dict[tuple[str, Place, str], tuple[Origin, list[int]]] = field(default_factory=dict)

    # -- hearing --------------------------------------------------------------------------------------

    def heard(self, event: Event) -> None:
        """Take the steps of scalers and schedulers."""
        scaler: Any = event.arguments.get("self")
        if event.name == "scheduler.step" and not event.is_after:
            optimizer: Any = getattr(scaler, "optimizer", None)
            self._scheduled[event.place] += 1
            self._ahead[event.place] += optimizer in self._known and self._known[optimizer].in_a_row > 0
        elif event.name == "scaler.step":
            self._step(scaler, event.arguments["optimizer"], event)
        elif event.name == "scaler.update" and event.is_after:
            self._update(scaler, event.step)

    def _step(self, scaler: Any, optimizer: Optimizer, event: Event) -> None:
        if not getattr(type(optimizer).step, "hooked", False):  # it is none of torch's, and its updates are not seen
            return
        if not event.is_after:
            self._before = self.training.updates
            self._scale = scaler.get_scale() if event.step + 1 in self.training.looked_at else 0.0
            return
        if optimizer not in self._known:
            self._known[optimizer] = History(event.place, scaler.get_growth_interval())
            self._histories.append(self._known[optimizer])
        history = self._known[optimizer]
        self._stepped.append(history)
        history.steps += 1
        if self.training.updates == self._before:
            history.skipped.append(history.steps)

    def _update(self, scaler: Any, ended: int) -> None:
        if self._scale:
            scale = scaler.get_scale()
            fell = scale < self._scale and not any(history.in_a_row for history in self._stepped)
            for history in self._stepped:
                history.scales += [self._scale, scale]
                if fell:  # a fused optimizer
                    history.skipped.append(history.steps)
        is_skipped = any(history.in_a_row for history in self._stepped)
        if is_skipped and (origin := self._overflow.origin()) is not None:
            call = origin[0]
            self._origins.setdefault((call.operator, call.place, call.phase), (origin, []))[1].append(ended)
        self._scale = 0.0
        self._stepped.clear()
        self._overflow = FirstOverflow()

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Keep the largest value of a result, if a scaler is there to skip the step."""
        if self._known and call.phase != "update":
            self._overflow.take(call, operator, tree_leaves((args, kwargs)), result)

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what became of the scales."""
        for history in self._histories:
            yield from self._of_scale(history)
        all_steps = max((one.steps for one in self._histories), default=0)
        for place, ahead in self._ahead.items():
            if ahead and 2 * self._scheduled[place] >= all_steps:  # else once an epoch
                yield finding(
                    "AMP210", place, f"the scheduler stepped {ahead} times after a skipped step, of "
                    f"{self._scheduled[place]}: the schedule is ahead of the training by as many",
                    "step the scheduler only if scaler.get_scale() has not fallen in scaler.update()",
                    level="" if ahead > OFTEN * all_steps else "note", skipped=ahead,
                )  # fmt: skip
        yield from self._causes()

    def _of_scale(self, history: History) -> Iterator[Finding]:
        """Yield a scale that only falls, or that never grows."""
        read = history.scales
        if history.in_a_row >= IN_A_ROW:
            seen = f", and the scale fell from {read[0]:g} to {read[-1]:g}" if read else ""
            adapts = history.in_a_row == history.steps and min(read, default=0.0) > ADAPTS
            yield finding(
                "AMP206", history.place, f"the last {history.in_a_row} of {history.steps} steps were skipped, as "
                f"gradients were infinite or NaN{seen}: nothing is learned",
                "mend what overflows, see AMP211; else use bfloat16",
                level="note" if adapts else "", skipped=len(history.skipped), steps=history.steps,
            )  # fmt: skip
            return
        is_grown = any(map(operator.gt, read[1:], read))
        if not read or is_grown or "float16" not in dtypes_seen(self.training):
            return
        scale = read[-1]
        if scale <= SMALL and not history.skipped:
            yield finding(
                "AMP207", history.place, f"the scale is {scale:g}, and grows after {history.interval} steps without a "
                f"skip: in the {history.steps} steps seen, gradients in float16 underflowed as without a scaler",
                "GradScaler(init_scale=2.0**16)", scale=scale, interval=history.interval,
            )  # fmt: skip
        elif history.interval > max(LONG, history.steps):
            yield finding(
                "AMP207", history.place, f"the scale of {scale:g} grows after {history.interval} steps without a skip, "
                f"and {history.steps} were seen: after a fall it stays low",
                f"GradScaler(growth_interval={LONG})", level="note", scale=scale, interval=history.interval,
            )  # fmt: skip

    def _causes(self) -> Iterator[Finding]:
        counts = (n for one in self._histories for n, step in enumerate(one.skipped, start=1) if n == step)
        search = max(counts, default=0)  # how many steps were skipped in a row at the beginning
        for (call, value, largest), steps in self._origins.values():
            # A first scale that is too high falls at the beginning, by design; no scale helps a forward.
            by_scale = call.phase == "backward" or call.place in self.training.scaled
            often = not by_scale or sum(step > search for step in steps) >= IN_A_ROW
            where = f"the backward of {call.place}" if call.phase == "backward" else str(call.place)
            inputs = f" from inputs of at most {largest:.3g}" if math.isfinite(largest) else ""
            module = f" in module {call.module}" if call.module else ""
            yield finding(
                "AMP211", call.place, f"{steps_text(steps)} skipped: {call.operator}{module}, {where}, returned the "
                f"first {value} of the step, in {call.output}{inputs}",
                "none while the scale adapts; if it goes on, run this operation in fp32" if by_scale else
                "run this operation in fp32, or scale its inputs down", level="warning" if often else "note",
                operator=call.operator, module=call.module, phase=call.phase, dtype=call.output, skipped=len(steps),
                largest=largest if math.isfinite(largest) else None,
            )  # fmt: skip
        for history in self._histories:
            if history.skipped and not self._origins:
                yield finding(
                    "AMP211", history.place, f"{len(history.skipped)} of {history.steps} steps were skipped "
                    f"({steps_text(history.skipped)}), and in none that was looked at was a cause found",
                    "look at more steps: --every 1", level="note", skipped=len(history.skipped), steps=history.steps,
                )  # fmt: skip

"""AMP206, AMP207, AMP210, AMP211: what became of the scale, and which steps were skipped, and why.

A step was skipped if ``scaler.step`` returned and the optimizer was not called; for a fused optimizer, which is called
and decides on the device, if the scale fell. The host reads a scale in looked-at steps alone.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from amp_graph.audit.codes import finding
from amp_graph.audit.first_overflow import FirstOverflow, Origin
from amp_graph.audit.records import Call, Event, Finding, Place, Training, Watcher
from amp_graph.audit.scaler_use import dtypes_seen, steps_text

IN_A_ROW = 3  # skipped steps at the end of a run, from which on the scale only falls
ADAPTS = 128.0  # scales from here on may still be too high, in a run that has only begun
SMALL = 16.0  # scales up to here hardly move gradients away from underflow
LONG = 2000  # torch's growth interval
OFTEN = 0.1  # the part of steps that are skipped, from which on a schedule is ahead by much


@dataclass
class History:
    """The scaled steps of an optimizer: how many, which were skipped, and (step, scale) where it was read."""

    place: Place
    interval: int
    steps: int = 0
    skipped: list[int] = field(default_factory=list)
    scales: list[tuple[int, float]] = field(default_factory=list)

    @property
    def in_a_row(self) -> int:
        """How many of the last steps were skipped."""
        row = 0
        while row < len(self.skipped) and self.skipped[-1 - row] == self.steps - row:
            row += 1
        return row


class SkippedSteps(Watcher):
    """Counts the skipped steps of each optimizer, and looks for the operation that made them so."""

    def __init__(self, training: Training) -> None:
        """Begin."""
        super().__init__(training)
        self._known: weakref.WeakKeyDictionary[Optimizer, History] = weakref.WeakKeyDictionary()
        self._histories: list[History] = []
        self._stepped: list[History] = []  # since the last update of a scaler
        self._before = 0  # optimizers' updates, when a scaler's step began
        self._scale = 0.0  # then, in a looked-at step
        self._skips = False  # whether a step since the last update of a scaler was skipped
        self._skipped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose last step was
        self._ahead: dict[Place, list[int]] = {}  # a scheduler's steps after skipped ones
        self._scheduled: Counter[Place] = Counter()
        self._scaled_at: set[Place] = set()  # where losses are multiplied by the scale
        self._overflow = FirstOverflow()
        self._origins: dict[tuple[str, Place, str], tuple[Origin, list[int]]] = {}

    # -- hearing --------------------------------------------------------------------------------------

    def heard(self, event: Event) -> None:
        """Take the steps of scalers and schedulers."""
        scaler: Any = event.arguments.get("self")
        if event.name == "scheduler.step" and not event.is_after:
            self._scheduled[event.place] += 1
            if getattr(scaler, "optimizer", None) in self._skipped:
                self._ahead.setdefault(event.place, []).append(event.step)
        elif event.name == "scaler.scale":
            self._scaled_at.add(event.place)
        elif event.name in ("scaler.step", "scaler.update") and scaler.is_enabled():
            if event.name == "scaler.step":
                self._step(scaler, event.arguments["optimizer"], event)
            elif event.is_after:
                self._update(scaler, event.step)

    def _step(self, scaler: Any, optimizer: Optimizer, event: Event) -> None:
        if not getattr(type(optimizer).step, "hooked", False):  # it is none of torch's, and its updates are not seen
            return
        if not event.is_after:
            self._before = self.training.updates
            self._scale = scaler.get_scale() if event.step + 1 in self.training.looked_at else 0.0
            return
        history = self._known.get(optimizer)
        if history is None:
            history = self._known[optimizer] = History(event.place, scaler.get_growth_interval())
            self._histories.append(history)
        self._stepped.append(history)
        history.steps += 1
        if self.training.updates == self._before:
            history.skipped.append(history.steps)
            self._skips = True
            self._skipped.add(optimizer)
        else:
            self._skipped.discard(optimizer)

    def _update(self, scaler: Any, ended: int) -> None:
        if self._scale:
            scale = scaler.get_scale()
            fell, self._skips = scale < self._scale and not self._skips, self._skips or scale < self._scale
            for history in self._stepped:
                history.scales += [(history.steps, self._scale), (history.steps + 1, scale)]
                if fell:  # a fused optimizer
                    history.skipped.append(history.steps)
        if self._skips and (origin := self._overflow.origin()) is not None:
            key = (origin.call.operator, origin.call.place, origin.call.phase)
            self._origins.setdefault(key, (origin, []))[1].append(ended)
        self._skips, self._scale = False, 0.0
        self._stepped.clear()
        self._overflow.clear()

    def ran(self, call: Call, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Keep the largest value of a result, if a scaler is there to skip the step."""
        if self._known and call.phase != "update":
            self._overflow.take(call, operator, tree_leaves((args, kwargs)), result)

    # -- findings -------------------------------------------------------------------------------------

    def findings(self) -> Iterator[Finding]:
        """Yield what became of the scales."""
        for history in self._histories:
            if history.in_a_row >= IN_A_ROW:
                yield self._falls(history)
            elif history.scales:
                yield from self._never_grows(history)
        for place, steps in self._ahead.items():
            all_steps = max((one.steps for one in self._histories), default=0)
            if 2 * self._scheduled[place] < all_steps:  # once an epoch
                continue
            yield finding(
                "AMP210", place, f"the scheduler stepped {len(steps)} times after a skipped step, of "
                f"{self._scheduled[place]}: the schedule is ahead of the training by as many",
                "step the scheduler only if scaler.get_scale() has not fallen in scaler.update()",
                level="" if len(steps) > OFTEN * all_steps else "note", skipped=len(steps),
            )  # fmt: skip
        yield from self._causes()

    def _falls(self, history: History) -> Finding:
        read = [scale for _, scale in history.scales]
        seen = f", and the scale fell from {read[0]:g} to {read[-1]:g}" if read else ""
        adapts = history.in_a_row == history.steps and min(read, default=0.0) > ADAPTS
        return finding(
            "AMP206", history.place, f"the last {history.in_a_row} of {history.steps} steps were skipped, as gradients "
            f"were infinite or NaN{seen}: nothing is learned", "mend what overflows, see AMP211; else use bfloat16",
            level="note" if adapts else "", skipped=len(history.skipped), steps=history.steps,
        )  # fmt: skip

    def _never_grows(self, history: History) -> Iterator[Finding]:
        scale = history.scales[-1][1]
        grown = any(after > before for (_, before), (_, after) in zip(history.scales, history.scales[1:], strict=False))
        if grown or "float16" not in dtypes_seen(self.training):
            return
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

    @property
    def _search(self) -> int:
        """How many steps were skipped in a row at the beginning."""
        counts = (n for one in self._histories for n, step in enumerate(one.skipped, start=1) if n == step)
        return max(counts, default=0)

    def _causes(self) -> Iterator[Finding]:
        for origin, steps in self._origins.values():
            call = origin.call
            # A first scale that is too high falls at the beginning, by design; no scale helps a forward.
            by_scale = call.phase == "backward" or call.place in self._scaled_at
            often = not by_scale or sum(step > self._search for step in steps) >= IN_A_ROW
            where = f"the backward of {call.place}" if call.phase == "backward" else str(call.place)
            inputs = f" from inputs of at most {origin.largest:.3g}" if math.isfinite(origin.largest) else ""
            module = f" in module {call.module}" if call.module else ""
            yield finding(
                "AMP211", call.place, f"{steps_text(steps)} skipped: {call.operator}{module}, {where}, returned the "
                f"first {origin.value} of the step, in {call.output}{inputs}",
                "none while the scale adapts; if it goes on, run this operation in fp32" if by_scale else
                "run this operation in fp32, or scale its inputs down", level="warning" if often else "note",
                operator=call.operator, module=call.module, phase=call.phase, dtype=call.output, skipped=len(steps),
                largest=origin.largest if math.isfinite(origin.largest) else None,
            )  # fmt: skip
        for history in self._histories:
            if history.skipped and not self._origins:
                yield finding(
                    "AMP211", history.place, f"{len(history.skipped)} of {history.steps} steps were skipped "
                    f"({steps_text(history.skipped)}), and in none that was looked at was a cause found",
                    "look at more steps: --every 1", level="note", skipped=len(history.skipped), steps=history.steps,
                )  # fmt: skip

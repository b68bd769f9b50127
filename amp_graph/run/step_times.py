"""Times the first steps both ways, for ``--measure``: as written, then converted.

A step is what lies between two ``optimizer.step()``. ``StepTimes(True).lines()``: "a step takes 12 ms as written, ...".
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

WARM_UP = 3  # steps that are not timed: first allocations, or the first capture
TIMED = 7


class StepTimes:
    """The times of the first steps; the steps are counted in any case."""

    def __init__(self, measured: bool) -> None:
        """Count the steps of every optimizer from now on, until ``end()``."""
        self.measured, self.steps = measured, 0
        self._times: dict[bool, list[float]] = {False: [], True: []}  # by whether models are converted
        self._last = 0.0
        self._skipped = WARM_UP
        self._converted = False
        self._first: Any = None
        self.end = register_optimizer_step_post_hook(self._stepped).remove

    def may_convert(self, calls: int) -> bool:
        """Return whether enough steps were timed as written; or after some ``calls``, without an optimizer to time."""
        timed = len(self._times[False]) >= TIMED
        return not self.measured or timed or (not self.steps and calls > WARM_UP + TIMED)

    def captured(self) -> None:
        """Take note that a graph was captured: this step is none of the usual ones."""
        self._skipped = max(self._skipped, WARM_UP)
        self._times[True].clear()
        self._converted = True

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._first = self._first or id(optimizer)
        if id(optimizer) != self._first:  # a second optimizer of the same step
            return
        self.steps += 1
        if not self.measured or len(self._times[True]) >= TIMED:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._skipped:
            self._skipped -= 1
        elif len(self._times[self._converted]) < TIMED:
            self._times[self._converted].append(now - self._last)
        self._last = now

    def medians(self) -> dict[str, float]:
        """Return the median seconds of a step both ways, as a report takes them; {} if either was not timed."""
        before, after = self._times[False], self._times[True]
        return (
            {"as written": statistics.median(before), "amp_graph": statistics.median(after)} if before and after else {}
        )

    def lines(self) -> list[str]:
        """Return what was measured, in a line."""
        if not self.measured:
            return []
        if not (medians := self.medians()):
            return [f"time: not measured: optimizers made {self.steps} steps, and {2 * (WARM_UP + TIMED)} are needed"]
        before, after = medians.values()
        return [
            f"time a step: {_ms(before)} as written, {_ms(after)} converted: {before / after:.2f} times the speed "
            f"(medians of {len(self._times[False])} and {len(self._times[True])} steps)"
        ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"

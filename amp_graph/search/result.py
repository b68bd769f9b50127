"""What a search found: a policy, what was tried, and how to make it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amp_graph.numerics.overflow.result import plain_values
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.search.trials import FULL, Goal, Trial, best_of

COLUMNS = ("policy", "time over fp32's", "speed", "error", "metric", "good enough", "why it was tried")


@dataclass(frozen=True)
class SearchResult:
    """The fastest policy that was measured and is exact enough.

    ``policy``: its text, as ``convert`` takes it. ``trials``: all that were measured, in order. ``goal``: what they had
    to keep. ``unit``: torch.autocast's error, NaN if it fails. ``noise``: the share of time that two measurements of
    the same step differ by. ``held_out``: the error on data that was not used to choose; NaN without such data.
    ``machine``: where it was measured. ``ended``: why the search ended. ``freeze``: the step was no training, and the
    model was measured frozen.
    """

    policy: str
    trials: Sequence[Trial]
    goal: Goal
    unit: float
    noise: float
    held_out: float
    machine: str
    ended: str
    freeze: bool = False

    @property
    def best(self) -> Trial:
        """What was measured of the policy."""
        return next(one for one in self.trials if one.policy == self.policy)

    def verdict(self) -> str:
        """Return the answer in a line."""
        best = self.best
        if best.policy == FULL:
            return f"keep fp32: {_why_full([one for one in self.trials if one.policy != FULL])}"
        held = "" if math.isnan(self.held_out) else f", {self.held_out:.2g} on held-out data"
        return f"{best.policy}: {1 / best.time:.2f} times fp32's speed, with an error of {best.error:.2g}{held}"

    def line(self) -> str:
        """Return the line of code that uses the answer."""
        converted = f'amp_graph.convert(model, "{self.policy}")'
        return f"model = {f'amp_graph.freeze({converted})' if self.freeze and self.policy != FULL else converted}"

    def text(self) -> str:
        """Return the answer, what was tried, and the line that uses it."""
        rows = [
            (one.policy, f"{one.time:.3f}", f"{1 / one.time:.2f}", f"{one.error:.2g}",
             "-" if math.isnan(one.metric) else f"{one.metric:.4g}", "yes" if self.goal.is_met(one) else "no", one.why)
            for one in self.trials
        ]  # fmt: skip
        goal = (
            f"error at most {self.goal.error:.2g}"
            if self.goal.error < math.inf
            else f"metric at most {self.goal.metric:g}"
        )
        lines = [
            self.verdict(),
            f"measured on {self.machine}, noise of times {self.noise:.1%}; {goal}; torch.autocast's is {self.unit:.2g}",
            "", *aligned([COLUMNS, *rows]), "", f"ended: {self.ended}",
            self.line(),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values; infinite numbers and NaN as text."""
        found: dict[str, Any] = plain_values({**asdict(self), "verdict": self.verdict()})
        return found


def _why_full(others: Sequence[Trial]) -> str:
    ran = [one for one in others if one.time < math.inf]
    fast = [one for one in ran if one.time < 1]
    if fast:
        nearest = min(fast, key=lambda one: one.error)
        return f"no faster policy is good enough; the nearest is {nearest.policy}, with an error of {nearest.error:.2g}"
    if not ran:
        return "no other policy runs"
    return f"the fastest other policy has {1 / min(one.time for one in ran):.2f} times its speed here"


def result_of(trials: list[Trial], goal: Goal, **facts: Any) -> SearchResult:
    """Return the result of what was measured so far."""
    return SearchResult(best_of(trials, goal).policy, tuple(trials), goal, **facts)

"""What a search found: a policy, what was tried, and how to make it again."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from amp_graph.numerics.overflow.result import plain_values
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.passes.native.output_file import write_or_refuse
from amp_graph.policy import Policy
from amp_graph.search.search_html import search_page
from amp_graph.search.trials import AUTOCAST, FULL, Goal, Trial

NOISY = 0.1  # the share of time from which a search warns of its noise
SHOWN = 60  # characters of a policy in the table
MEMORY, METRIC = "peak memory", "metric"  # columns that are left out where nothing was measured of them
COLUMNS = ("policy", "time over fp32's", "speed", MEMORY, "error", METRIC, "kept", "why it was tried")
ANSWER = "the answer"


@dataclass(frozen=True)
class SearchResult:
    """The fastest policy that was measured and is exact enough.

    ``policy``: its text, as ``convert`` takes it, with the machine. ``trials``: all that were measured, in order.
    ``goal``: what they had to keep. ``autocast``: what was measured of torch.autocast. ``noise``: the share of time
    that two measurements of the same step differ by. ``held_out``: the error on data that was not used to choose; NaN
    without such data. ``machine``: where it was measured. ``ended``: why the search ended. ``freeze``: the step was no
    training, and the model was measured frozen. ``script``: the words of a script that the model and its steps were
    taken from. ``again``: the command that was given.
    """

    policy: str
    trials: Sequence[Trial]
    goal: Goal
    autocast: Trial
    noise: float
    held_out: float
    machine: str
    ended: str
    freeze: bool = False
    script: str = ""
    again: str = ""

    @property
    def unit(self) -> float:
        """The error of torch.autocast, infinite if it fails: the unit of relative budgets."""
        return self.autocast.error

    @property
    def measured(self) -> Sequence[Trial]:
        """All rows of the table: what was tried, and torch.autocast."""
        return (*self.trials, self.autocast)

    @property
    def by_metric(self) -> bool:
        """Whether the budget is one of the user's metric."""
        return math.isfinite(self.goal.metric)

    @property
    def best(self) -> Trial:
        """What was measured of the policy."""
        measured = str(replace(Policy.parse(self.policy), measured_on=""))
        return next(one for one in self.trials if one.policy == measured)

    def verdict(self) -> str:
        """Return the answer in a line, and whether torch.autocast is good enough and faster."""
        own = self.autocast
        is_faster = self.goal.is_met(own) and own.time * (1 + self.noise) < self.best.time
        speed = f"; torch.autocast is faster here: {1 / own.time:.2f} times fp32's speed" if is_faster else ""
        return self._answer() + speed

    def _answer(self) -> str:
        best, others = self.best, [one for one in self.trials if one.policy != FULL]
        if best.policy == FULL:
            if best.metric > self.goal.metric:
                return f"no policy is good enough: fp32 itself has a metric of {best.metric:.4g}"
            return f"keep fp32: {self._why_full(others)}"
        if self.by_metric:
            return f"{best.policy}: {1 / best.time:.2f} times fp32's speed, with a metric of {best.metric:.4g}"
        held = "" if math.isnan(self.held_out) else f", {self.held_out:.3g} on held-out data"
        times = f": {best.error / self.unit:.2f} times torch.autocast's" if 0 < self.unit < math.inf else ""
        return f"{best.policy}: {1 / best.time:.2f} times fp32's speed, with an error of {best.error:.3g}{held}{times}"

    def _why_full(self, others: Sequence[Trial]) -> str:
        ran = [one for one in others if one.time < math.inf]
        fast = [one for one in ran if one.time * (1 + self.noise) < 1]
        if not ran:
            return f"no other policy runs: {others[0].failure}" if others else "no other policy was measured"
        if not fast:
            speed = 1 / min(one.time for one in ran)
            noise = f", which is within the noise of {self.noise:.0%}" if speed > 1 else ""
            return f"the fastest other policy has {speed:.2f} times its speed here{noise}"
        nearest = min(fast, key=lambda one: one.metric if self.by_metric else one.error)
        found = f"a metric of {nearest.metric:.4g}" if self.by_metric else f"an error of {nearest.error:.3g}"
        return f"no faster policy is good enough; the nearest is {shown(nearest.policy)}, with {found}"

    def line(self) -> str:
        """Return the line of code, or the command, that uses the answer; "" for fp32."""
        if self.policy == FULL:
            return ""
        if self.script:
            return f"amp-graph run --policy {shlex.quote(self.policy)} {self.script}"
        converted = f'amp_graph.convert(model, "{self.policy}")'
        return f"model = {f'amp_graph.freeze({converted})' if self.freeze else converted}"

    def text(self) -> str:
        """Return the answer, what was tried, and the line that uses it."""
        table = aligned(self.table())
        return "\n".join([self.verdict(), self.terms(), "", *table, "", f"ended: {self.ended}", *self.commands(), ""])

    def terms(self) -> str:
        """Return what was measured, where, and what had to be kept."""
        goal = f"error at most {self.goal.error:.3g}; torch.autocast's is {self.unit:.3g}"
        goal = f"metric at most {self.goal.metric:g}" if self.by_metric else goal
        what = "forward, without gradients, of a frozen model" if self.freeze else "forward and backward"
        noisy = " (too much to tell policies apart whose times differ by less)" if self.noise > NOISY else ""
        return f"{what}, on {self.machine}; noise of times {self.noise:.1%}{noisy}; {goal}"

    def commands(self) -> list[str]:
        """Return how the answer is used, and how the search is made again, as far as known."""
        return [f"{name:7}{line}" for name, line in (("use:", self.line()), ("again:", self.again)) if line]

    def table(self) -> list[list[str]]:
        """Return the names of the columns, and a row for each policy that was tried."""
        columns = [name for name in COLUMNS if (self.by_metric or name != METRIC)
                 and (any(one.memory for one in self.trials) or name != MEMORY)]  # fmt: skip
        cells = [
            dict(zip(COLUMNS, (
                shown(one.policy), f"{one.time:.3f}{f' ±{one.spread:.1%}' if one.spread else ''}",
                f"{1 / one.time:.2f}", f"{one.memory / 2**20:.1f} MiB", f"{one.error:.3g}", f"{one.metric:.4g}",
                self.fate(one), f"{one.why}{f'; measured {one.runs} times' if one.runs > 1 else ''}",
            ), strict=True))
            for one in self.measured
        ]  # fmt: skip
        return [columns, *([row[name] for name in columns] for row in cells)]

    def fate(self, one: Trial) -> str:
        """Say whether a policy is the answer, or why it is not. one: what was measured of it."""
        if one == self.best:
            return ANSWER
        if math.isinf(one.time):
            return "no: fails"
        if one.policy == AUTOCAST:
            return "to compare"
        if one.memory > self.goal.memory:
            return "no: too much memory"
        if not self.goal.is_met(one):
            return f"no: {self.goal.excess(one):.3g} times the budget"
        if one.time >= self.best.time:
            return "no: slower"
        within = one.time * (1 + self.noise) >= self.best.time
        return "no: as fast, by the noise" if within else "no: beyond the budget on held-out data"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values; infinite numbers and NaN as text."""
        found: dict[str, Any] = plain_values({**asdict(self), "verdict": self.verdict()})
        return found

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write a page with a curve and the table to ``path``; AmpGraphError if that is impossible."""
        write_or_refuse(path, search_page(self), "search: found.html(path)", 'found.html("search.html")')


def shown(policy: str) -> str:
    """Return how a policy is printed: fp32 by name, and the first words of a long one."""
    if policy == FULL:
        return "fp32"
    return policy if len(policy) <= SHOWN else f"{policy[:SHOWN]}..."

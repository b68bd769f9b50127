"""What is tried, and what was measured of it: plain values, which a file of the search holds.

Before: ``Trial("bf16,accuracy=fast", time=0.61, error=1.4)``, predicted. After: ``Trial("bf16,accuracy=fast",
time=0.66, error=1.2, ...)``, measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FULL, AUTOCAST = "bf16-O0", "torch.autocast"
FAILS, NOT_FINITE = ": fails: ", "a value is not finite"
SAME = 1.02  # errors that differ by less are those of one plan in another order of sums
EVEN = 0.01  # the share of time by which policies differ that are as fast as each other


@dataclass(frozen=True)
class Trial:
    """A policy that may be tried, with what is predicted of it, or was measured, as torch.autocast was; NaN: not known.

    ``time``: of a step, over fp32's, by the median of turns with what was the best before. ``error``: of the step,
    relative to fp32's, predicted: to
    autocast's; infinite if it failed or is not finite. ``metric``: the user's; NaN without one. ``memory``: the
    peak in bytes, on CUDA; else 0. ``why``: why it was tried, or how it failed. ``spread``: the standard error of
    ``time``, as a share of it. ``beside``: the policy that it was measured in turns with. ``runs``: how many times.
    """

    policy: str
    time: float = math.nan
    error: float = math.nan
    metric: float = math.nan
    memory: int = 0
    why: str = ""
    spread: float = 0.0
    beside: str = FULL
    runs: int = 1

    def doubt(self, other: Trial) -> float:
        """Return the share by which the ratio of the two times may be off: two standard errors."""
        if other.policy == self.beside:
            return 2 * self.spread
        return 2 * (other.spread if self.policy == other.beside else math.hypot(self.spread, other.spread))

    @property
    def failure(self) -> str:
        """How it failed; "" if it ran."""
        return self.why.partition(FAILS)[2]


@dataclass(frozen=True)
class Goal:
    """What a trial must keep: the largest ``error``, relative to fp32's; or the largest ``metric``; and ``memory``."""

    error: float = math.inf
    metric: float = math.inf
    memory: float = math.inf

    def is_met(self, trial: Trial) -> bool:
        """Say whether ``trial`` is good enough."""
        return self.is_exact(trial) and trial.memory <= self.memory

    def is_exact(self, trial: Trial) -> bool:
        """Say whether ``trial`` ran, and its error or its metric is within the goal."""
        exact = trial.error <= self.error * SAME and math.isfinite(trial.time)
        return exact and (math.isinf(self.metric) or trial.metric <= self.metric)

    def excess(self, trial: Trial) -> float:
        """Return by what factor the error of ``trial``, or its metric, is beyond the goal."""
        found, most = (trial.error, self.error) if math.isinf(self.metric) else (trial.metric, self.metric)
        return found / most if most else math.inf


def best_of(trials: list[Trial], goal: Goal, noise: float = 0.0) -> Trial:
    """Return the fastest trial that is good enough, else fp32, the first one; of equals, the one that was tried first.

    ``noise``: the share of time that is no gain over fp32; other policies are equals within ``EVEN``, if it is no less.
    """
    good = [one for one in trials if goal.is_met(one)]
    least = min((one.time for one in good), default=math.inf)
    even = {True: 1 + noise, False: 1 + min(noise, EVEN)}
    return next((one for one in good if one.time <= least * even[one.policy == FULL]), trials[0])


def put(trials: list[Trial], found: Trial) -> Trial:
    """Put ``found`` into ``trials``, in the place of what was measured of its policy before; return it as put."""
    place = next((i for i, one in enumerate(trials) if one.policy == found.policy), len(trials))
    for old in trials[place : place + 1]:
        found = replace(found, why=found.why if found.failure else old.why, runs=old.runs + 1)
    trials[place : place + 1] = [found]
    return found

"""Chooses what to measure next, from what is predicted and what was measured: a function of numbers alone.

First fp32 and the default plan. Then the predicted plan that is the fastest once the predictions are corrected by what
was measured: gains by one factor, errors by another. Where no plan is exact enough, the operations that measured
sensitivities blame are kept in fp32, as many as the measured error asks for. Then the words that are not of precision,
one after the other. It ends where the predicted gain is within the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amp_graph.policy import Policy
from amp_graph.search.trials import FULL, SAME, Candidate, Goal, Trial, best_of

ROOM = 0.9  # of the goal, which a set of operations is chosen for: a prediction is no measurement


@dataclass(frozen=True)
class Space:
    """What may be tried.

    ``plans``: predicted, the default one first. ``shares``: of the default plan's squared error, by operation, as
    ``keep_ops`` takes it. ``words``: (name, value), each of which may be set in any low policy.
    """

    plans: Sequence[Candidate]
    shares: Mapping[str, float]
    words: Sequence[tuple[str, Any]] = ()


def propose(space: Space, trials: list[Trial], goal: Goal, noise: float, unit: float) -> tuple[str, str] | None:
    """Return (policy, why) to measure next; None if nothing is predicted to gain more than ``noise``, a share of time.

    ``unit``: autocast's measured error, which predicted errors are multiples of.
    """
    tried = {one.policy for one in trials}
    if FULL not in tried:
        return FULL, "what all others are compared with"
    if space.plans[0].policy not in tried:
        return space.plans[0].policy, "the default plan"
    best = best_of(trials, goal, noise)
    return (
        _next_plan(space, trials, goal, best, noise, unit)
        or _kept_operations(space, trials, goal, best)
        or _next_word(space, trials, best)
    )


def _next_plan(
    space: Space, trials: list[Trial], goal: Goal, best: Trial, noise: float, unit: float
) -> tuple[str, str] | None:
    """Return the fastest plan by the corrected predictions, of those that they find exact enough."""
    of = {one.policy: one for one in trials}
    known = [(plan, of[plan.policy]) for plan in space.plans if plan.policy in of]
    gains = [(1 - trial.time) / (1 - plan.time) for plan, trial in known if plan.time < 1]
    errors = [trial.error / (plan.error * unit) for plan, trial in known if plan.error * unit > 0]
    gain = statistics.median(gains) if gains else 1.0
    worse = statistics.median(errors) if errors else 1.0
    open_ = [
        (1 - gain * (1 - plan.time), plan)
        for plan in space.plans
        if plan.policy not in of and plan.error * unit * worse <= goal.error * SAME
    ]
    if not open_:
        return None
    time, plan = min(open_, key=lambda pair: pair[0])
    if time >= best.time * (1 - noise):
        return None
    return plan.policy, f"{1 / time:.2f} times fp32's speed expected, {plan.error * unit * worse:.2g} of error"


def _kept_operations(space: Space, trials: list[Trial], goal: Goal, best: Trial) -> tuple[str, str] | None:
    """Return the default plan with what makes most of its error in fp32, if no low plan is good enough."""
    base = space.plans[0].policy
    sets = [one for one in trials if one.policy == base or one.policy.startswith(f"{base},keep_ops=")]
    if best.policy != FULL or not space.shares or any(one.time >= 1 for one in sets):
        return None
    worst = sorted(space.shares, key=lambda key: -space.shares[key])
    last = sets[-1]
    kept = last.policy.removeprefix(base).removeprefix(",keep_ops=").split("|") if last.policy != base else []
    left = sum(space.shares[key] for key in worst[len(kept) :])
    allowed = left * (ROOM / goal.excess(last)) ** 2
    count = len(kept) + 1
    while count < len(worst) and sum(space.shares[key] for key in worst[count:]) > allowed:
        count += 1
    if count >= len(worst):
        return None
    why = f"no low plan is exact enough: the {count} operations that make most of the error stay in fp32"
    return f"{base},keep_ops={'|'.join(worst[:count])}", why


def _next_word(space: Space, trials: list[Trial], best: Trial) -> tuple[str, str] | None:
    """Return the best low policy with the next word that was not tried."""
    if best.policy == FULL:
        return None
    policies = [Policy.parse(one.policy) for one in trials]
    for name, value in space.words:
        if all(getattr(one, name) != value for one in policies):
            return str(replace(Policy.parse(best.policy), **{name: value})), f"whether {name}={value} is faster"
    return None

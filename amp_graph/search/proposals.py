"""Chooses what to measure next, from what is predicted and what was measured: a function of numbers alone.

First fp32 and the default plan. Then the predicted plan that is the fastest once the predictions are corrected by what
was measured: gains by one factor, errors by another; and plans that are a little too slow or too inexact by that, as
far as predictions may be off. Where the default plan is not exact enough, the operations that measured sensitivities
blame are kept in fp32, as many as the measured error asks for. What may be as fast as the best, by the spread of its
turns, is measured again beside it. Then the words that are not of precision, each in the best policy so far, and with
them the plans that were nearly as fast: casts that a word saves were part of their times. It ends where no gain beyond
the noise is left to predict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amp_graph.policy import Policy
from amp_graph.search.trials import EVEN, FULL, SAME, Goal, Trial, best_of

ROOM = 0.9  # of the goal, which a set of operations is chosen for: a prediction is no measurement
DOUBT_OF_TIME, DOUBT_OF_ERROR = 1.05, 1.5  # by what factors predictions may be off, once they are corrected
BY_WORDS = 1.25  # times fp32's time: what is slower without a word is not tried with it
PATIENCE = 5  # runs after which fp32 is the answer, if whatever is exact enough is slower
MOST = 3  # times that a policy is measured
NEAR = 1.15  # times the time of the best plan: what is slower is not tried with the best plan's words


@dataclass(frozen=True)
class Space:
    """What may be tried.

    ``plans``: predicted, the default one first. ``shares``: of the default plan's squared error, by operation, as
    ``keep_ops`` takes it. ``words``: (name, value), each of which may be set in any low policy, that of most expected
    gain first. ``note``: what the default plan keeps in fp32, and why.
    """

    plans: Sequence[Trial]
    shares: Mapping[str, float]
    words: Sequence[tuple[str, Any]] = ()
    note: str = ""


def propose(space: Space, trials: list[Trial], goal: Goal, noise: float, unit: float) -> tuple[str, str] | None:
    """Return (policy, why) to measure next; None if nothing is predicted to gain more than ``noise``, a share of time.

    One that was measured is to be measured again. ``unit``: autocast's measured error, which predicted errors are
    multiples of.
    """
    tried = {one.policy for one in trials}
    if FULL not in tried:
        return FULL, "what all others are compared with"
    if space.plans[0].policy not in tried:
        return space.plans[0].policy, f"the default plan{space.note}"
    if sum(one.runs for one in trials) >= PATIENCE and all(one.time > 1 - noise for one in trials):
        return None
    best = best_of(trials, goal, noise)
    return (
        _next_plan(space, trials, goal, best, noise, unit)
        or _kept_operations(space, trials, goal, best, noise)
        or _next_rival(trials, goal, best, noise)
        or _next_word(space, trials, goal, best, noise)
        or _next_plan_with_words(space, trials, goal, best)
    )


def _next_plan(
    space: Space, trials: list[Trial], goal: Goal, best: Trial, noise: float, unit: float
) -> tuple[str, str] | None:
    """Return the fastest plan by the corrected predictions, of those that they find exact enough.

    If none is left, the most exact of those beyond, up to the first that was measured and is not exact enough.
    """
    of = {one.policy: one for one in trials}
    known = [(plan, of[plan.policy]) for plan in space.plans if plan.policy in of]
    ran = [(plan, trial) for plan, trial in known if math.isfinite(trial.time)]
    gain = statistics.median([(1 - trial.time) / (1 - plan.time) for plan, trial in ran if plan.time < 1] or [1.0])
    worse = statistics.median([trial.error / plan.error for plan, trial in ran if plan.error * unit > 0] or [unit])
    refuted = min((plan.error for plan, trial in ran if not goal.is_exact(trial)), default=math.inf)
    doubt = 1 + (DOUBT_OF_TIME - 1) * max(1.0, gain)  # of what gains more than predicted, by as much more
    slowest, most = best.time * (1 - noise if best.policy == FULL else doubt), goal.error * SAME
    left = []
    for plan in space.plans:
        time, error = 1 - gain * (1 - plan.time), plan.error * worse
        beyond = 0.0 if error <= most else error / most if most else math.inf
        is_open = plan.policy not in of and beyond <= DOUBT_OF_ERROR and plan.error < refuted
        if is_open and time < (best.time if beyond else slowest):
            left.append((beyond, time, error, plan.policy))
    if not left:
        return None
    _, time, error, policy = min(left)
    return policy, f"{1 / time:.2f} times fp32's speed expected, {error:.2g} of error"


def _kept_operations(
    space: Space, trials: list[Trial], goal: Goal, best: Trial, noise: float
) -> tuple[str, str] | None:
    """Return the default plan with what makes most of its error in fp32, if it is faster than what is good enough."""
    base = Policy.parse(space.plans[0].policy)
    policies = [(one, Policy.parse(one.policy)) for one in trials]
    sets = [(one, policy.keep_ops) for one, policy in policies if replace(policy, keep_ops=base.keep_ops) == base]
    last, kept = sets[-1]
    if not space.shares or last.time >= best.time * (1 - noise) or any(goal.is_exact(one) for one, _ in sets):
        return None
    worst = sorted(space.shares, key=lambda key: -space.shares[key])
    count = len(kept) - len(base.keep_ops)
    allowed = sum(space.shares[key] for key in worst[count:]) * (ROOM / goal.excess(last)) ** 2
    more = range(count + 1, len(worst))
    count = next((n for n in more if sum(space.shares[key] for key in worst[n:]) <= allowed), 0)
    if not count:
        return None
    why = f"the default plan is not exact enough: the {count} operations that make most of the error stay in fp32"
    return str(replace(base, keep_ops=(*base.keep_ops, *worst[:count]))), why


def _next_word(space: Space, trials: list[Trial], goal: Goal, best: Trial, noise: float) -> tuple[str, str] | None:
    """Return the best low policy with a word more, or less, that was not tried and has not been slower before."""
    exact = [one for one in trials if one.policy != FULL and goal.is_exact(one)]
    heavy = any(one.memory > goal.memory for one in exact)
    if best.policy == FULL:
        best = min(exact, key=lambda one: one.memory if heavy else one.time, default=best)
    if best.policy == FULL or best.time > BY_WORDS:
        return None
    policy, off = Policy.parse(best.policy), Policy.parse(space.plans[0].policy)
    times = {Policy.parse(one.policy): one.time for one in trials}
    for name, value in sorted(space.words, key=lambda word: heavy and word[0] != "recompute"):
        old = getattr(policy, name)
        new = value if old == getattr(off, name) else getattr(off, name)
        changed = replace(policy, **{name: new})
        if changed not in times and not _was_slower(name, old, new, times, noise):
            return str(changed), f"whether another {name} is faster"
    return None


def _next_plan_with_words(space: Space, trials: list[Trial], goal: Goal, best: Trial) -> tuple[str, str] | None:
    """Return a plan that was nearly as fast as the best one, with the words of the best policy."""
    policy, off = Policy.parse(best.policy), Policy.parse(space.plans[0].policy)
    tried = {Policy.parse(one.policy): one for one in trials}
    times = {asked: one.time for asked, one in tried.items() if goal.is_exact(one)}
    least = times.get(replace(policy, **{name: getattr(off, name) for name, _ in space.words}), math.inf)
    words = {name: getattr(policy, name) for name, _ in space.words}
    for plan in map(Policy.parse, [one.policy for one in space.plans] if best.policy != FULL else []):
        changed = replace(plan, **words)
        if times.get(plan, math.inf) <= least * NEAR and changed not in tried:
            return str(changed), "whether another accuracy is faster with these words"
    return None


def _was_slower(name: str, old: Any, new: Any, times: Mapping[Policy, float], noise: float) -> bool:
    """Say whether a policy was slower with the ``new`` value of a word than with the old one, beyond the noise."""
    olds = {replace(policy, **{name: new}): time for policy, time in times.items() if getattr(policy, name) == old}
    return any(times[policy] > time * (1 + noise) for policy, time in olds.items() if policy in times)


def _next_rival(trials: list[Trial], goal: Goal, best: Trial, noise: float) -> tuple[str, str] | None:
    """Return the fastest policy that may be faster than the best by as much as their times are in doubt.

    Of the best and fp32, the best one, which is then measured beside fp32.
    """
    rivals = []
    for one in trials:
        doubt = one.doubt(best)
        time = one.time * (1 - noise if one.policy == FULL else 1)
        least = best.time * (1 - noise if best.policy == FULL else 1)
        again = best if one.policy == FULL else one
        is_good = one != best and goal.is_met(one)
        if is_good and again.runs < MOST and doubt > EVEN and time * (1 - doubt) < least:
            rivals.append((time, again.policy))
    return (min(rivals)[1], "to measure it again") if rivals else None

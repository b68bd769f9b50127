"""What is proposed, on spaces whose times and errors are made up: the optimum is known."""

import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest

from amp_graph.policy import Policy
from amp_graph.search.proposals import Space, propose
from amp_graph.search.trials import FULL, Goal, Trial, best_of, put

UNIT = 0.004


def searched(space, world, goal, *, noise=0.01, most=25):
    """Return the trials of a search in which ``world(policy)`` is (time, error)."""
    trials = []
    while len(trials) < most and (proposal := propose(space, trials, goal, noise, UNIT)):
        policy = proposal[0]
        trials.append(Trial(policy, *((1.0, 0.0) if policy == FULL else world(policy))))
    return trials


def drawn(seed):
    """Return plans along a hull: the faster, the less exact."""
    draw = random.Random(seed)
    times = sorted((draw.uniform(0.3, 1.2) for _ in range(6)), reverse=True)
    errors = sorted(draw.uniform(0.5, 4) for _ in range(6))
    names = ["bf16-O1", *(f"bf16-O1,accuracy={n}" for n in range(2, 7))]
    return [Trial(*row) for row in zip(names, times, errors, strict=True)]


def measured_by(plans, *, gain=1.0, worse=1.0):
    """Return a world in which the predictions are off by two factors."""
    of = {plan.policy: plan for plan in plans}
    return lambda policy: (1 - gain * (1 - of[policy].time), worse * of[policy].error * UNIT)


@pytest.mark.parametrize(("gain", "worse"), [(1.0, 1.0), (0.6, 1.0), (1.0, 1.7), (0.7, 0.5)])
def test_the_fastest_plan_within_the_goal_is_found_also_where_predictions_are_off(gain, worse):
    for seed in range(200):
        plans = drawn(seed)
        world, goal = measured_by(plans, gain=gain, worse=worse), Goal(error=2 * UNIT)
        found = best_of(searched(Space(plans, {}), world, goal), goal)
        everything = [Trial(FULL, 1.0, 0.0), *(Trial(p.policy, *world(p.policy)) for p in plans)]
        best = best_of(everything, goal)
        assert goal.is_met(found)
        assert found.time <= best.time * 1.011, seed  # a gain within the noise is not looked for


def test_control_without_corrections_a_better_plan_is_missed():
    plans = [Trial("bf16-O1", 0.9, 2.0), Trial("bf16-O1,accuracy=2", 0.5, 4.0)]
    goal = Goal(error=2.5 * UNIT)
    world = measured_by(plans, worse=0.5)
    assert best_of(searched(Space(plans, {}), world, goal), goal).policy == "bf16-O1,accuracy=2"
    missed = [Trial(FULL, 1.0, 0.0), Trial("bf16-O1", 0.9, 2.0 * UNIT)]  # as predicted: nothing is learned
    assert propose(Space(plans, {}), missed, goal, 0.01, UNIT) is None


def test_the_operations_that_spoil_every_plan_are_kept_in_fp32():
    shares = {"bad:linear": 0.98, "a:linear": 0.01, "b:linear": 0.01}
    goal = Goal(error=0.01)

    def world(policy):
        kept = policy.partition("keep_ops=")[2].split("|")
        return 0.5 + 0.1 * len(kept), 0.05 * math.sqrt(sum(s for key, s in shares.items() if key not in kept))

    found = best_of(searched(Space([Trial("bf16-O1", 0.5, 1.0)], shares), world, goal), goal)
    assert found.policy == "bf16-O1,keep_ops=bad:linear"


def test_operations_are_kept_in_fp32_also_where_a_slower_plan_is_exact_enough():
    plans = [Trial("bf16-O1", 0.4, 1.0), Trial("bf16-O1,accuracy=0.5", 0.9, 0.3)]
    space = Space(plans, {"bad:linear": 0.98, "a:linear": 0.01, "b:linear": 0.01})
    goal, unit = Goal(error=0.5 * UNIT), UNIT
    world = {"bf16-O1": (0.4, unit), "bf16-O1,accuracy=0.5": (0.9, 0.3 * unit)}
    trials = searched(space, lambda policy: world.get(policy, (0.5, 0.15 * unit)), goal)
    assert best_of(trials, goal).policy == "bf16-O1,keep_ops=bad:linear"


def test_a_plan_that_is_predicted_a_little_too_inexact_is_measured_and_ends_the_plans_beyond_it():
    errors = (1.0, 1.2, 1.3, 1.4)
    plans = [Trial(f"bf16-O1,accuracy={n}" if n else "bf16-O1", 0.9 - n / 10, e) for n, e in enumerate(errors)]
    world, goal = measured_by(plans), Goal(error=1.0 * UNIT)
    assert [one.policy for one in searched(Space(plans, {}), world, goal)] == [FULL, "bf16-O1", "bf16-O1,accuracy=1"]
    better = {"bf16-O1,accuracy=1": (0.8, 1.0 * UNIT), "bf16-O1,accuracy=2": (0.7, 1.01 * UNIT)}
    found = searched(Space(plans, {}), lambda policy: better.get(policy, world(policy)), goal)
    assert best_of(found, goal).policy == "bf16-O1,accuracy=2"
    assert not goal.is_met(found[-1])  # the control: the next plan is not exact enough


def noisy(truth, seed, *, told):
    """Return the answer of a search whose first measurements are off by 3 %, and whether their spread is ``told``."""
    draw, goal, trials = random.Random(seed), Goal(error=UNIT), []
    space = Space([Trial(policy, time, 1.0) for policy, time in truth.items() if policy != FULL], {})
    while proposal := propose(space, trials, goal, 0.01, UNIT):
        policy = proposal[0]
        best = best_of(trials, goal, 0.01) if trials else Trial(FULL, 1.0, 0.0)
        beside = trials[0] if policy == best.policy and trials else best
        spread = 0.004 if any(one.policy == policy for one in trials) else 0.03
        found = truth[policy] / truth[beside.policy] * draw.gauss(1, spread) * beside.time
        error = 0.0 if policy == FULL else UNIT
        put(trials, Trial(policy, 1.0 if policy == FULL else found, error, spread=spread * told, beside=beside.policy))
    assert sum(one.runs for one in trials) <= 25
    return best_of(trials, goal, 0.01).policy


def test_what_may_be_as_fast_as_the_best_is_measured_again():
    truth = {FULL: 1.0, "bf16-O1": 0.62, "bf16-O1,accuracy=2": 0.61, "bf16-O1,accuracy=3": 0.59}
    right = [noisy(truth, seed, told=True) == "bf16-O1,accuracy=3" for seed in range(200)]
    by_luck = [noisy(truth, seed, told=False) == "bf16-O1,accuracy=3" for seed in range(200)]
    assert sum(right) >= 195
    assert sum(by_luck) <= 175  # the control


WORDS = [("replay", True), ("level", "O2"), ("recompute", "all")]


def by_words(**factors):
    """Return a world in which each word takes its share of the time, if ``without`` another one."""

    def world(policy):
        asked, time = Policy.parse(policy), 0.7
        for name, value in WORDS:
            time *= factors.get(name, 1.0) if getattr(asked, name) == value else 1.0
        return time, UNIT

    return world


def test_words_are_tried_in_the_best_policy_so_far_and_kept_where_they_are_faster():
    space = Space([Trial("bf16-O1", 0.7, 1.0)], {}, WORDS)
    trials = searched(space, by_words(replay=0.8, level=1.2, recompute=0.9), Goal(error=UNIT))
    assert [one.policy for one in trials] == [
        FULL, "bf16-O1", "bf16-O1,replay=true", "bf16-O2,replay=true", "bf16-O1,recompute=all,replay=true",
    ]  # fmt: skip
    assert best_of(trials, Goal(error=UNIT)) == trials[-1]


def test_a_word_that_gains_only_together_with_another_one_is_found():
    def world(policy):
        asked = Policy.parse(policy)
        return (0.5 if asked.replay and asked.level == "O2" else 0.6 if asked.replay else 0.7), UNIT

    space = Space([Trial("bf16-O1", 0.7, 1.0)], {}, [("level", "O2"), ("replay", True)])
    trials = searched(space, world, Goal(error=UNIT))
    assert best_of(trials, Goal(error=UNIT)).policy == "bf16-O2,replay=true"


def test_every_word_of_the_answer_was_measured_to_be_no_slower_than_the_other_value():
    for seed in range(200):
        draw = random.Random(seed)
        times = defaultdict(lambda draw=draw: draw.uniform(0.4, 0.9))
        space, goal = Space([Trial("bf16-O1", 0.7, 1.0)], {}, WORDS), Goal(error=UNIT)
        trials = searched(space, lambda policy, times=times: (times[policy], UNIT), goal)
        answer = Policy.parse(best_of(trials, goal, 0.01).policy)
        measured = {Policy.parse(one.policy): one.time for one in trials}
        for name, value in WORDS:
            values = {getattr(Policy(), name), value}
            own = getattr(answer, name)
            (other,) = values - {own}
            pairs = [
                (t, measured.get(replace(p, **{name: other}))) for p, t in measured.items() if getattr(p, name) == own
            ]
            assert any(without is not None and time <= without * 1.011 for time, without in pairs), (seed, name)
        assert len(trials) <= 9


def test_a_plan_that_is_faster_only_with_a_word_is_found():
    plans = [Trial("bf16-O1", 0.65, 1.0), Trial("bf16-O1,skip_unprofitable=true", 0.55, 1.0)]
    plans.append(Trial("bf16-O1,accuracy=fast", 0.61, 1.0))
    world = {"bf16-O1": 0.64, "bf16-O1,skip_unprofitable=true": 0.6, "bf16-O1,accuracy=fast": 0.8}
    low = {"bf16-O2": 0.5, "bf16-O2,skip_unprofitable=true": 0.55}
    space, goal = Space(plans, {}, [("level", "O2")]), Goal(error=UNIT)
    trials = searched(space, lambda policy: ((world | low).get(policy, 0.9), UNIT), goal)
    assert best_of(trials, goal).policy == "bf16-O2"
    tried = [one.policy for one in trials]
    assert tried == [FULL, *world, "bf16-O2,skip_unprofitable=true", "bf16-O2"]  # accuracy=fast is far slower without
    trials = searched(space, lambda policy: (world.get(policy, 0.9), UNIT), goal)
    assert [one.policy for one in trials] == tried[:-1]  # no word is part of the best policy


def test_words_may_make_low_precision_pay_but_not_where_it_is_far_from_it():
    space, goal = Space([Trial("bf16-O1", 0.7, 1.0)], {}, WORDS), Goal(error=UNIT)
    for first, tried in ((1.2, 3), (1.4, 2)):
        world = {"bf16-O1": first}
        trials = searched(space, lambda policy, world=world: (world.get(policy, 0.8), UNIT), goal)
        assert len(trials) >= tried
        assert (best_of(trials, goal).policy == FULL) == (first == 1.4)


def test_a_step_that_takes_too_much_memory_is_tried_with_what_saves_memory_first():
    space, goal = Space([Trial("bf16-O1", 0.7, 1.0)], {}, WORDS), Goal(error=UNIT, memory=10)
    trials = [Trial(FULL, 1.0, 0.0, memory=20), Trial("bf16-O1", 0.7, UNIT, memory=12)]
    proposal = propose(space, trials, goal, 0.01, UNIT)
    assert proposal is not None
    assert proposal[0] == "bf16-O1,recompute=all"
    light = [*trials, Trial(proposal[0], 0.8, UNIT, memory=8)]
    assert best_of(light, goal).policy == "bf16-O1,recompute=all"


def test_where_fp16_fails_the_other_dtype_is_tried():
    space = Space([Trial("fp16-O1", 0.6, 1.0), Trial("bf16-O1", 0.6, 8.0)], {}, WORDS)
    world = {"fp16-O1": (math.inf, math.inf)}
    trials = searched(space, lambda policy: world.get(policy, (0.6, UNIT)), Goal(error=8 * UNIT))
    assert best_of(trials, Goal(error=8 * UNIT)).policy == "bf16-O1"


def test_two_searches_whose_measurements_differ_by_noise_agree_within_it():
    noise = 0.02
    for seed in range(100):
        plans, goal = drawn(seed), Goal(error=2 * UNIT)
        world = measured_by(plans, gain=0.9)
        true = lambda policy, world=world: world(policy)[0]  # noqa: E731
        answers = []
        for run in range(2):
            draw = random.Random((seed, run).__hash__())
            noisy = lambda policy, draw=draw, world=world: (  # noqa: E731
                world(policy)[0] * draw.uniform(1 - noise / 2, 1 + noise / 2),
                world(policy)[1],
            )
            best = best_of(searched(Space(plans, {}), noisy, goal, noise=noise), goal, noise)
            answers.append(1.0 if best.policy == FULL else true(best.policy))
        assert abs(answers[0] / answers[1] - 1) <= 3 * noise, seed

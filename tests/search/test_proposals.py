"""What is proposed, on spaces whose times and errors are made up: the optimum is known."""

import math
import random
from dataclasses import replace

import pytest

from amp_graph.search.proposals import Space, propose
from amp_graph.search.trials import FULL, Candidate, Goal, Trial, best_of

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
    return [Candidate(*row) for row in zip(names, times, errors, strict=True)]


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
    plans = [Candidate("bf16-O1", 0.9, 2.0), Candidate("bf16-O1,accuracy=2", 0.5, 4.0)]
    goal = Goal(error=2.5 * UNIT)
    world = measured_by(plans, worse=0.5)
    assert best_of(searched(Space(plans, {}), world, goal), goal).policy == "bf16-O1,accuracy=2"
    missed = [Trial(FULL, 1.0, 0.0), Trial("bf16-O1", 0.9, 2.0 * UNIT)]  # as predicted: nothing is learned
    assert propose(Space(plans, {}), missed, goal, 0.01, UNIT) is None


def test_where_low_precision_does_not_pay_fp32_is_the_answer_after_a_few_trials():
    plans = drawn(0)
    trials = searched(Space(plans, {"fc:linear": 1.0}), lambda policy: (1.3, 0.001), Goal(error=1.0))
    assert best_of(trials, Goal(error=1.0)).policy == FULL
    assert len(trials) <= 5


def test_the_operations_that_spoil_every_plan_are_kept_in_fp32():
    shares = {"bad:linear": 0.98, "a:linear": 0.01, "b:linear": 0.01}
    goal = Goal(error=0.01)

    def world(policy):
        kept = policy.partition("keep_ops=")[2].split("|")
        return 0.5 + 0.1 * len(kept), 0.05 * math.sqrt(sum(s for key, s in shares.items() if key not in kept))

    found = best_of(searched(Space([Candidate("bf16-O1", 0.5, 1.0)], shares), world, goal), goal)
    assert found.policy == "bf16-O1,keep_ops=bad:linear"


def test_words_are_tried_once_each_and_kept_where_they_are_faster():
    times = {"bf16-O1": 0.7, "bf16-O1,skip_unprofitable=true": 0.6, "bf16-O2,skip_unprofitable=true": 0.8}
    space = Space([Candidate("bf16-O1", 0.7, 1.0)], {}, [("skip_unprofitable", "true"), ("level", "O2")])
    trials = searched(space, lambda policy: (times[policy], UNIT), Goal(error=UNIT))
    assert [one.policy for one in trials] == [FULL, *times]
    assert best_of(trials, Goal(error=UNIT)).policy == "bf16-O1,skip_unprofitable=true"


def test_the_same_measurements_lead_to_the_same_proposals_from_any_point_on():
    for seed in range(20):
        plans = drawn(seed)
        goal, world = Goal(error=2 * UNIT), measured_by(plans, gain=0.8)
        whole = searched(Space(plans, {}), world, goal)
        for stop in range(len(whole)):
            proposal = propose(Space(plans, {}), [replace(one) for one in whole[:stop]], goal, 0.01, UNIT)
            assert proposal is not None
            assert proposal[0] == whole[stop].policy

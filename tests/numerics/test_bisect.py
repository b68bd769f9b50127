"""A bisection finds what must stay in fp32, in few runs, and its policy meets the tolerance when run from scratch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.errors import AmpGraphWarning, PolicyError
from amp_graph.numerics.bisect import smallest
from amp_graph.numerics.differences import error_metric
from tests.by_hand import descend
from tests.numerics.planted import COARSE, MODELS, made

SLOW = ("CNN", "GPT", "LSTM", "BERT")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_one_bad_operation_is_found_within_the_bound_and_the_policy_meets_the_tolerance(name):
    model, batches, loss_fn = made(name, "coarse", count=2)
    found = amp_graph.bisect(model, batches, loss_fn, tolerance=0.03, policy="bf16")
    assert found.kept == (COARSE,)
    assert found == f"bf16-O1,keep_ops={COARSE}"
    assert found.runs <= math.ceil(math.log2(found.candidates)) + 3
    metric = error_metric(model, batches, loss_fn, amp_graph.Policy.parse("bf16"))
    assert metric(amp_graph.convert(copy.deepcopy(model), found), batches) == found.error <= 0.03
    assert metric(amp_graph.convert(copy.deepcopy(model), "bf16"), batches) > 0.03, "the control"


def test_an_overflow_is_found_in_fp16():
    model, batches, loss_fn = made("MLP", "forward", count=2)
    found = amp_graph.bisect(model, batches, loss_fn, tolerance=0.01, policy="fp16")
    assert 1 <= len(found.kept) <= 2
    assert found.error <= 0.01


def test_a_metric_of_the_users_own_trains_a_copy():
    model, batches, _ = made("MLP", "coarse", count=2)
    before = copy.deepcopy(model.state_dict())

    def metric(model, batches):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x, y in batches:
            loss = descend(optimizer, F.mse_loss(model(x), y))
        return loss.detach()

    exact = float(metric(copy.deepcopy(model), batches))
    found = amp_graph.bisect(
        model, batches, tolerance=0.005, metric=lambda m, b: abs(metric(m, b) - exact), policy="bf16"
    )
    assert COARSE in found.kept
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_plan_that_is_good_enough_is_kept_as_it_is():
    model, batches, loss_fn = made("MLP", "none", count=1)
    found = amp_graph.bisect(model, iter(batches), loss_fn, tolerance=0.1, policy="bf16")
    assert (str(found), found.kept, found.runs) == ("bf16-O1", (), 2)


def test_a_pattern_without_a_match_is_told_once_and_not_by_each_trial():
    model, batches, loss_fn = made("MLP", "coarse", count=1)
    with pytest.warns(AmpGraphWarning, match="matches no module") as told:
        amp_graph.bisect(model, batches, loss_fn, tolerance=0.03, policy="bf16,keep_fp32=absent")
    assert len(told) == 1


def test_what_is_wrong_is_said():
    model, batches, loss_fn = made("MLP", "none", count=1)
    with pytest.raises(PolicyError, match="fp32 itself misses the tolerance"):
        amp_graph.bisect(model, batches, loss_fn, tolerance=1e-12, policy="bf16")
    with pytest.raises(PolicyError, match="no tolerance"):
        amp_graph.bisect(model, batches, loss_fn, tolerance=float("nan"))
    with pytest.raises(PolicyError, match="the metric returned a str"):
        amp_graph.bisect(model, batches, tolerance=0.1, metric=lambda model, batches: "good")


# -- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 64, 100, 1000])
def test_each_single_candidate_is_found_in_few_trials(count):
    names = [str(i) for i in range(count)]
    for bad in (names[0], names[count // 3], names[-1]):
        trials = []

        def meets(kept, bad=bad, trials=trials):
            trials.append(kept)
            return bad in kept

        assert smallest(names, meets, 1000) == ((bad,), True)
        assert len(trials) + 1 <= math.ceil(math.log2(count)) + 3, "and one run in fp32"


def test_several_are_found_and_none_too_many():
    names = [str(i) for i in range(50)]
    for bad in ({"3", "17", "49"}, {"0", "1"}, set(names[:4]), set()):
        chosen, is_minimal = smallest(names, bad.issubset, 1000)
        assert (set(chosen), len(chosen), is_minimal) == (bad, len(bad), True)


def test_what_cannot_be_met_is_none_and_a_limit_ends_with_a_sufficient_set():
    names = [str(i) for i in range(50)]
    assert smallest(names, lambda kept: False, 1000) is None
    assert smallest([], lambda kept: False, 1000) is None
    chosen, is_minimal = smallest(names, lambda kept: len(kept) >= 20, 6)
    assert not is_minimal
    assert len(chosen) >= 20
    assert len(smallest(names, lambda kept: len(kept) >= 5, 1000)[0]) == 5

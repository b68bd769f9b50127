"""Whether values and copies of weights are finite: what is known of them, until when; and what it allows."""

import math

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.weights import finite_check
from amp_graph.passes.weights.finite_check import FiniteWeights, all_finite_of, is_finite, max_pool_of

BAD = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 8, 6), (1, 2, 2, 2), (1, 1, 2, 8)])
def test_maxima_of_neighbours_are_those_of_max_pool(size, shape):
    x = torch.randn(shape).relu().bfloat16()
    pooled = max_pool_of(FiniteWeights())
    assert torch.equal(pooled(x, size, True), F.max_pool2d(x, size, 2, size - 2))


@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_left_to_torch(bad, monkeypatch):
    monkeypatch.setattr(finite_check, "_maxima", None)
    x, weights = torch.randn(1, 2, 4, 4).relu().bfloat16(), FiniteWeights()
    weight = torch.tensor([bad])
    weights.note("conv", weight, finite=False)
    pooled = max_pool_of(weights)
    expected = F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(pooled(x, 3, True), expected)  # a weight is not
    assert torch.equal(max_pool_of(FiniteWeights())(x, 3, False), expected)  # the images are not
    assert not weights.is_all_finite
    weights.note("other", torch.ones(1), finite=True)
    assert not weights.is_all_finite
    del weight  # nothing reads it any longer
    assert weights.is_all_finite


def test_a_weight_that_was_updated_and_a_dropped_one_are_forgotten():
    weights, weight = FiniteWeights(), torch.ones(2)
    weights.note("conv", weight, finite=False)
    weights.note("conv", weight, finite=True)
    assert weights.is_all_finite
    weights.note("conv", weight, finite=False)
    weights.drop()
    assert weights.is_all_finite


@pytest.mark.parametrize("bad", BAD)
def test_a_copy_is_looked_at_once_until_it_is_written(bad, monkeypatch):
    seen = []

    def looked_at(x):
        seen.append(x)
        return is_finite(x)

    monkeypatch.setattr(finite_check, "is_finite", looked_at)
    weights, low, other = FiniteWeights(), torch.ones(4), torch.zeros(3)
    assert [weights.is_kept_finite(t) for t in (low, other, low, other)] == [True] * 4
    assert len(seen) == 2
    low[1] = bad
    assert [weights.is_kept_finite(t) for t in (low, other, low)] == [False, True, False]
    assert len(seen) == 3
    with torch.inference_mode():
        of_this_call = torch.ones(2)
        assert weights.is_kept_finite(of_this_call)
        of_this_call[0] = bad
        assert not weights.is_kept_finite(of_this_call)  # it has no counter
    seen.clear()
    del low
    weights.is_kept_finite(torch.ones(5))
    assert len(weights._known) == 2  # the one that is gone is not kept


@pytest.mark.parametrize("bad", BAD)
def test_all_values_all_copies_and_what_was_before_count(bad):
    all_finite = all_finite_of(FiniteWeights())
    fine, wrong = torch.ones(3), torch.tensor([1.0, bad])
    assert all_finite((fine, fine), (fine,))
    assert all_finite(())
    assert not all_finite((fine, wrong))
    assert not all_finite((fine,), (fine, wrong))
    assert not all_finite((fine,), (fine,), False)

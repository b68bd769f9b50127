"""Finite numbers stay finite in low precision where they are added; infinities, NaN and factors stay as they are."""

import math

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.casts.insert_casts import InsertCasts
from amp_graph.passes.casts.saturation import out_of_range, within_range
from tests.passes.graphs import BF16, FP16, capture_function, passes_before, passes_until

LEAST = torch.finfo(torch.float32).min
X, W = torch.ones(2, 4, 8), torch.ones(8, 8)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_only_finite_values_beyond_the_range_change(dtype):
    limit = torch.finfo(dtype).max
    given = torch.tensor([LEAST, -LEAST, -math.inf, math.inf, math.nan, 3.0])
    expected = torch.tensor([-limit, limit, -math.inf, math.inf, math.nan, 3.0])
    assert torch.equal(within_range(given, dtype).nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(within_range(given, dtype).to(dtype).isinf(), given.isinf())


def test_gradients_pass_where_a_value_is_clamped():
    given = torch.tensor([LEAST, -math.inf, 7e4, 3.0], requires_grad=True)
    within_range(given, FP16).nan_to_num(0.0, neginf=0.0).sum().backward()
    assert given.grad.tolist() == [1.0, 0.0, 1.0, 1.0]


def large(function):
    gm, _ = capture_function(function, X, w=W).through(passes_before(InsertCasts, "bf16"))
    return {n.op if n.op == "placeholder" else getattr(n.target, "__name__", n.target) for n in out_of_range(gm, BF16)}


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda s, x: x @ s.w + (x * LEAST), "mul"),  # a constant that rounds to infinity
        (lambda s, x: (x @ s.w).masked_fill(x > 2, LEAST).tanh(), "masked_fill"),
        (lambda s, x: (x + 1).view(8, 8) @ s.w, "view"),  # what the caller gives, through elementwise operations
    ],
)
def test_numbers_of_the_caller_and_constants_may_be_out_of_range(function, held):
    assert held in large(function)


def test_results_of_products_and_of_softmax_are_not():
    assert large(lambda s, x: (x @ s.w).softmax(-1) + 1.0) == {"placeholder"}


def saturated(function, policy="bf16"):
    gm, _ = capture_function(function, X, w=W).through(passes_until(InsertCasts, policy))
    return [n for n in gm.graph.nodes if n.target is within_range]


@pytest.mark.parametrize("function", [lambda s, x: F.linear(x, s.w), lambda s, x: x @ s.w, lambda s, x: x @ x.mT @ x])
def test_factors_of_products_are_rounded_alone(function):
    assert saturated(function) == []


def test_addends_of_products_are_clamped():
    found = saturated(lambda s, x: torch.baddbmm(x, x, s.w.expand(2, 8, 8)))
    assert [n.args[0].op for n in found] == ["placeholder"]


@pytest.mark.parametrize("allowed", ["add", "softmax"])
def test_what_a_user_allows_besides_products_is_clamped(allowed):
    def masked(s, x):
        return torch.add((x @ s.w).float(), x * LEAST).softmax(-1)

    assert saturated(masked, f"bf16,allow={allowed}")


@pytest.mark.parametrize("factor_first", [True, False])
def test_a_cast_that_a_factor_and_an_addend_share_is_clamped(factor_first):
    def masked(s, x):
        mask = x * LEAST
        seen = mask @ s.w if factor_first else None
        scores = torch.add((x @ s.w).float(), mask).softmax(-1)
        return scores, mask @ s.w if seen is None else seen

    assert saturated(masked, "bf16,allow=add")


def test_what_only_moves_to_a_factor_is_rounded_alone():
    assert saturated(lambda s, x: x.permute(0, 2, 1).reshape(-1, 8) @ s.w) == []

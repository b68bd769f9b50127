"""The measuring instruments, on models whose answers are known, and on wrong models that they must find."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from tests import measure
from tests.corpus.core import Case, args
from tests.corpus.losses import project
from tests.layers import layers
from tests.measure import Run, error_ratio, gradient_errors

BF16 = torch.bfloat16
autocast = partial(torch.autocast, "cpu", BF16)


def case(build, *shape, tags=()):
    return Case("known", build, lambda: args(torch.randn(*shape)), project, frozenset(tags))


MLP = case(lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)), 4, 8)


def test_the_reference_is_exact_and_a_plain_run_has_fp32_errors():
    ref, plain = measure.reference(MLP), measure.run(MLP)
    assert measure.output_error(ref, ref) == 0
    assert 0 < measure.output_error(plain, ref) < 1e-6
    assert set(gradient_errors(plain, ref)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert max(gradient_errors(plain, ref).values()) < 1e-5


def _lose_bias(model):
    model[0].bias.register_hook(torch.zeros_like)
    return model


def test_a_lost_bias_gradient_is_found_by_parameter_but_not_by_the_global_norm():
    big = case(lambda: nn.Sequential(nn.Linear(256, 4), nn.Tanh(), nn.Linear(4, 256)), 32, 256)
    ref, broken = measure.reference(big), measure.run(big, prepare=_lose_bias)
    assert gradient_errors(broken, ref)["0.bias"] == pytest.approx(1)
    low = measure.global_gradient_error(measure.run(big, context=autocast), ref)
    assert measure.global_gradient_error(broken, ref) < 0.1
    assert low < 0.1
    ratios = error_ratio(big, _lose_bias, autocast, (0,))
    assert ratios.gradient_max == ratios.gradient["0.bias"] > 20
    assert ratios.gradient_median < 1


def test_a_missing_gradient_is_an_error_of_one_and_a_surplus_one_is_refused():
    ref = Run((), 0.0, {"a": torch.ones(3, dtype=torch.float64)})
    assert gradient_errors(Run((), 0.0, {}), ref) == {"a": 1.0}
    with pytest.raises(ValueError, match="'b'"):
        gradient_errors(Run((), 0.0, {**ref.grads, "b": torch.ones(1)}), ref)


def test_a_nan_is_never_hidden():
    ref = measure.reference(MLP)
    broken = measure.run(MLP, prepare=lambda m: nn.Sequential(m, Times(math.nan)))
    assert math.isnan(measure.output_error(broken, ref))
    ratios = error_ratio(MLP, lambda m: nn.Sequential(m, Times(math.nan)), autocast, (0,))
    assert math.isnan(ratios.output)
    assert math.isnan(ratios.gradient_worst)


@layers(lambda factor: dict(factor=factor))
def Times(self, x):
    return x * self.factor


def test_a_gradient_that_is_mathematically_zero_is_measured_by_the_average_gradient():
    norm = case(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), 32, 8)
    ref = measure.reference(norm)
    assert measure.zero_gradients(ref) == {"0.bias"}
    low = measure.run(norm, context=autocast)
    assert (low.grads["0.bias"].norm() / ref.grads["0.bias"].norm()) > 1e6
    assert gradient_errors(low, ref)["0.bias"] < 0.1
    assert "0.bias" not in error_ratio(norm, lambda m: m, autocast, (0,)).gradient
    # ... and yet a wrong gradient there is found.
    wrong = Run(low.outputs, low.loss, {**low.grads, "0.bias": low.grads["0.bias"] + 1})
    assert gradient_errors(wrong, ref)["0.bias"] > 1


def test_a_loss_scale_saves_small_gradients_in_fp16():
    tiny = Case("known", MLP.build, MLP.inputs, lambda out: project(out) * 1e-6)
    ref = measure.reference(tiny)

    def worst(scale):
        low = measure.run(tiny, context=lambda: torch.autocast("cpu", torch.float16), loss_scale=scale)
        return max(gradient_errors(low, ref).values())

    assert worst(2.0**16) < 0.02
    assert worst(1.0) > 0.1

"""Ranges over batches: how those of batches, and of two values of one batch, are joined, and what leaves a dtype."""

import dataclasses

import pytest
import torch

from amp_graph.passes.calibration.ranges import Range, is_measurable, range_of


def test_peaks_of_batches_add_up_and_those_of_one_batch_do_not():
    a, b = Range(7e4, 3, {"float16": 1, "bfloat16": 0}), Range(9e4, 2, {"float16": 2, "bfloat16": 1})
    assert a + b == Range(9e4, 5, {"float16": 3, "bfloat16": 1})
    assert a.beside(b) == Range(9e4, 3, {"float16": 2, "bfloat16": 1})
    assert b.beside(a) == a.beside(b)


def test_a_joined_range_is_that_of_the_joined_values():
    a, b = torch.tensor([1.0, -0.5, 0.0, 3.0]), torch.tensor([0.0, 5.0, -1e-3, float("inf")])
    joined, whole = range_of([a]) + range_of([b]), range_of([torch.cat([a, b])])
    assert joined.peak == Range(5.0, 2, {"float16": 0, "bfloat16": 0})
    assert joined == dataclasses.replace(whole, batches=2)
    assert (whole.least, whole.elements, whole.zeros, whole.masked) == (pytest.approx(1e-3), 7, 2, 1)
    assert list(joined.exponents) == sorted(joined.exponents)
    assert range_of([a, b]) == whole, "two values of one batch"


def test_the_least_of_zeros_is_none():
    zeros, ones = range_of([torch.zeros(3)]), range_of([torch.ones(2)])
    assert (zeros.least, zeros.largest, zeros.zeros, zeros.exponents) == (0.0, 0.0, 3, {})
    assert (zeros + ones).least == (ones + zeros).least == 1.0
    assert zeros.fractions("float16") == {"overflow": 0.0, "subnormal": 0.0, "underflow": 0.0}


@pytest.mark.parametrize(("value", "over"), [(65504.0, 0), (65536.0, 1), (3.38e38, 1)])
def test_what_is_above_float16_is_counted(value, over):
    found = range_of([torch.tensor([value])])
    assert found.peak == Range(value if value < 1e6 else pytest.approx(value), 1, {"float16": over, "bfloat16": 0})


@pytest.mark.parametrize("exponent", [15, 16, -14, -15, -24, -25, -26])
def test_each_exponent_has_the_fate_of_torchs_cast(exponent):
    x = torch.tensor([1.25 * 2.0**exponent])
    low = x.to(torch.float16).float()
    fate = "overflow" if low.isinf() else "underflow" if low == 0 else "subnormal" if low < 2.0**-14 else "normal"
    shares = range_of([x]).fractions("float16")
    assert [name for name, share in shares.items() if share == 1.0] == [fate] * (fate != "normal")
    scaled = range_of([x]).fractions("float16", scale=2.0**-exponent)
    assert set(scaled.values()) == {0.0}, "times the scale it is 1.25"


def test_only_dense_float32_is_measured():
    assert range_of([torch.ones(3, dtype=torch.float64), torch.ones(2, dtype=torch.int64), torch.ones(0)]) is None
    assert not is_measurable(torch.ones(3).to_sparse())
    assert range_of([torch.ones(0), torch.full((2,), 4.0)]).elements == 2
    assert range_of([torch.arange(12.0).reshape(3, 4).t().requires_grad_()]).largest == 11.0

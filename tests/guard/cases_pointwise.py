"""Sums and zeros between guard pages."""

import math

import torch

from amp_graph.passes.native import cast_kernel
from tests.guard.case import FP32, LOWS, SIZES, drawn, equal, over

COUNTS = (*SIZES, 4095, 4097, 9001)


@over(count=COUNTS, low=LOWS, terms=(0, 1, 2, 5, 16))
def add_up(count, low, terms):
    given = [drawn(count, dtype=low if i % 2 else FP32) for i in range(terms)]
    if not terms:
        equal(cast_kernel.clear(torch.empty(count)), torch.zeros(count))
        return
    found = cast_kernel.total_of(given)
    wanted = given[0].float()
    for term in given[1:]:
        wanted = wanted + term.float()
    equal(found, wanted)


@over(count=COUNTS)
def of_special_numbers(count):
    """Infinities and NaN among the terms."""
    x, y = drawn(count), drawn(count)
    x[::3], x[1::7], x[2::11] = math.inf, math.nan, -math.inf
    equal(cast_kernel.total_of([x, y]), x.float() + y.float())

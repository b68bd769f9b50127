"""Casts and sums between guard pages."""

import math

import torch

from amp_graph.passes.native import cast_kernel
from tests.guard.case import BF16, FP32, LOWS, SIZES, drawn, equal, over

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


@over(count=COUNTS, low=LOWS)
def casts(count, low):
    wide = drawn(count, dtype=FP32)
    made = torch.empty(count, dtype=low)
    equal(cast_kernel.copy_into(made, wide), wide.to(low))
    equal(cast_kernel.widened(made, made), wide.to(low).float())


@over(outputs=(0, 1, 3), channels=(0, 1, 3, 16, 17, 33), kernel=((1, 3), (3, 3), (8, 8)), low=LOWS)
def layouts(outputs, channels, kernel, low):
    wide = drawn(outputs, channels, *kernel, dtype=FP32)
    last = torch.empty_like(wide, dtype=low, memory_format=torch.channels_last)
    equal(cast_kernel.copy_into(last, wide), wide.to(low))
    for source in (last, last.float()):  # what is low, or fp32 in the other layout
        first = torch.empty(wide.shape)
        equal(cast_kernel.copy_into(first, source), wide.to(low).float())


@over(count=COUNTS)
def of_special_numbers(count):
    """Infinities and NaN, by casts."""
    x = drawn(count)
    x[::3], x[1::7], x[2::11] = math.inf, math.nan, -math.inf
    made = torch.empty(count, dtype=BF16)
    equal(cast_kernel.copy_into(made, x.float()), x)

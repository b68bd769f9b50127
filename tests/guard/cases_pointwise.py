"""Casts and sums, tables and dropout between guard pages."""

import math

import torch

from amp_graph.passes.backends.cpu.pointwise import bitmask_dropout, lookup_table
from amp_graph.passes.native import cast_kernel
from tests.guard.case import BF16, FP32, LOWS, SIZES, drawn, equal, op, over, same

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


@over(count=COUNTS, form=tuple(lookup_table.FORMS))
def tables(count, form):
    x, grad = drawn(count, scale=3), drawn(count)
    wide = lookup_table.FORMS[form]
    same(op("activation_by_table")(x, form), wide.function(x.double()))
    same(op("gradient_by_table")(grad, x, form), wide.gradient(grad.double(), x.double()), 2.0**-6)


@over(count=(*COUNTS, 624 * 3 + 5), low=(*LOWS, FP32), keys=(1, 3))
def dropout(count, low, keys):
    x = drawn(count, dtype=low)
    if bitmask_dropout.library(low) is None:
        return  # torch draws otherwise here
    torch.manual_seed(3)
    bits = op("dropout_bits")(x, 0.3, keys)
    kept = bitmask_dropout.kept_of(bits, count * keys)
    torch.manual_seed(3)
    equal(kept, torch.empty(count * keys).bernoulli_(0.7).to(torch.bool))
    if keys == 1:
        noise = torch.where(kept, torch.ones(count, dtype=low).div_(1 - 0.3), 0.0)
        equal(op("scaled_by_bits")(x, bits, 0.3), x * noise.to(low))


@over(count=(0, 1, 7, 8, 9, 17, 4099))
def draws(count):
    """The generator's state, and no more bytes than bits take."""
    found = bitmask_dropout.library(FP32)
    if found is None:
        return
    state = torch.Generator().manual_seed(5).get_state().clone()
    bits = torch.empty(-(-count // 8), dtype=torch.uint8)
    found.draw(state.data_ptr(), math.ceil(0.7 * 2.0**53), count, bits.data_ptr())
    wanted = torch.empty(count).bernoulli_(0.7, generator=torch.Generator().manual_seed(5)).to(torch.bool)
    equal(bitmask_dropout.kept_of(bits, count), wanted)


@over(count=COUNTS)
def of_special_numbers(count):
    """Infinities and NaN, by tables and by casts."""
    x = drawn(count)
    x[::3], x[1::7], x[2::11] = math.inf, math.nan, -math.inf
    equal(op("activation_by_table")(x, "silu"), torch.nn.functional.silu(x))
    made = torch.empty(count, dtype=BF16)
    equal(cast_kernel.copy_into(made, x.float()), x)

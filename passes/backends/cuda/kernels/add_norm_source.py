"""The Triton source of a residual sum with the norm behind it, whole rows in registers, forward and backward.

Before: a sum, a norm and a cast, each of which reads and writes all of memory.
After: each value is read once, and each result written once.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl


def _forward(
    x, branch, weight, bias, total, low, wide, stats, rows, width, eps,
    SUMMED: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    LOW: tl.constexpr, WIDE: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row of ``x + branch``, its norm in two precisions, and mean and reciprocal deviation, of [2, rows]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if SUMMED:
        value += tl.load(branch + place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what is normed is the sum that others read
    mean = 0.0
    if CENTERED:
        mean = tl.sum(value, 0) / width
        value = tl.where(inside, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(stats + row, mean)
    tl.store(stats + rows + row, scale)
    value *= scale
    if WEIGHTED:
        value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if LOW:
        tl.store(low + place, value.to(low.dtype.element_ty), mask=inside)
    if WIDE:
        tl.store(wide + place, value, mask=inside)


def _backward(
    first, second, third, fourth, grad_sum, total, stats, weight, wide, low, weights, biases, rows, width,
    COUNT: tl.constexpr, SUMMED: tl.constexpr, WEIGHTED: tl.constexpr, WIDE: tl.constexpr, LOW: tl.constexpr,
    OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum's gradient for each n-th row, and this program's share of those of weight and bias.

    first .. fourth: gradients of the norm's results, of which ``COUNT`` are given; grad_sum: of other readers of the
    sum. weights, biases: fp32 [programs, width].
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    of_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        place = row * width + column
        grad = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
        if COUNT > 1:
            grad += tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
        if COUNT > 2:
            grad += tl.load(third + place, mask=inside, other=0.0).to(tl.float32)
        if COUNT > 3:
            grad += tl.load(fourth + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(stats + rows + row)
        normed = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            normed = tl.where(inside, normed - tl.load(stats + row), 0.0)
        normed *= scale
        if OF_WEIGHT:
            of_weight += grad * normed
        if OF_BIAS:
            of_bias += grad
        if WIDE or LOW:
            if WEIGHTED:
                grad *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            along = tl.sum(grad * normed, 0) / width
            found = grad - normed * along
            if CENTERED:
                found -= tl.sum(grad, 0) / width
            found *= scale
            if SUMMED:
                found += tl.load(grad_sum + place, mask=inside, other=0.0).to(tl.float32)
            if WIDE:
                tl.store(wide + place, found, mask=inside)
            if LOW:
                tl.store(low + place, found.to(low.dtype.element_ty), mask=inside)
    share = tl.cast(program, tl.int64) * width + column
    if OF_WEIGHT:
        tl.store(weights + share, of_weight, mask=inside)
    if OF_BIAS:
        tl.store(biases + share, of_bias, mask=inside)


forward_kernel: Any = triton.jit(_forward, do_not_specialize=["rows"])
backward_kernel: Any = triton.jit(_backward, do_not_specialize=["rows"])

"""The Triton source of the cross entropy of low-precision logits, a row or a part of one per program.

Before: fp32 logits, their log softmax, and its gradient, each written to memory and read again.
After: the logits are read once in each direction, and upcast in registers.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl


def _rows(
    logits, target, weight, losses, stats, legal,
    rows, stride, classes, ignore, keep, spread,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row, and the maximum of its logits and the logarithm of its sum, to ``stats`` [2, rows].

    keep: 1 - smoothing; spread: smoothing / classes. legal: set to 0 by a target that is no class.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(target + row)
    if place == ignore:
        tl.store(losses + row, 0.0)
        tl.store(stats + row, 0.0)
        tl.store(stats + rows + row, 0.0)
    else:
        start = logits + row * stride
        most = float("-inf")
        total = 0.0
        apart = 0.0  # the sum of weight * (logit - most)
        weights = 0.0
        for first in range(0, classes, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < classes
            x = tl.load(start + column, mask=inside, other=float("-inf")).to(tl.float32)
            more = tl.maximum(most, tl.max(x, 0))
            shift = tl.where(more == float("-inf"), 0.0, more)  # so far all words are masked out
            total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 0)
            if SMOOTHED:
                each = tl.where(inside, 1.0, 0.0)
                if WEIGHTED:
                    each = tl.load(weight + column, mask=inside, other=0.0)
                before = tl.where(most == float("-inf"), shift, most)
                apart += (before - shift) * weights + tl.sum(each * tl.where(inside, x - shift, 0.0), 0)
                weights += tl.sum(each, 0)
            most = more
        is_class = (place >= 0) & (place < classes)
        tl.store(legal, 0, mask=is_class == 0)
        logarithm = tl.log(total)
        at_target = tl.load(start + place, mask=is_class, other=float("nan")).to(tl.float32)
        loss = (most - at_target) + logarithm
        if WEIGHTED:
            loss *= tl.load(weight + place, mask=is_class, other=float("nan"))
        if SMOOTHED:
            loss = keep * loss + spread * (weights * logarithm - apart)
        tl.store(losses + row, loss)
        tl.store(stats + row, most)
        tl.store(stats + rows + row, logarithm)


def _gradient(
    logits, made, target, weight, weights, stats, grad, others,
    rows, stride, classes, blocks, grad_stride, ignore, keep, spread,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, ADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of a row's logits to ``made`` [rows, classes], which may be the logits.

    weights: the sum of all class weights, a tensor of one. others: fp32 [rows, classes], added before the rounding.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    place = tl.load(target + row)
    found = tl.zeros([BLOCK], dtype=tl.float32)
    if place != ignore:
        x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        chance = tl.exp((x - tl.load(stats + row)) - tl.load(stats + rows + row))
        given = tl.load(grad + row * grad_stride)
        own = given
        if WEIGHTED:
            is_class = (place >= 0) & (place < classes)
            own *= tl.load(weight + place, mask=is_class, other=float("nan"))
        if SMOOTHED:
            own *= keep
            each = given * spread
            if WEIGHTED:
                found = chance * (own + each * tl.load(weights))
                found -= each * tl.load(weight + column, mask=inside, other=0.0)
            else:
                found = chance * (own + each * classes) - each
        else:
            found = chance * own
        found -= tl.where(column == place, own, 0.0)
    offset = row * classes + column
    if ADDED:
        found += tl.load(others + offset, mask=inside, other=0.0)
    tl.store(made + offset, found.to(made.dtype.element_ty), mask=inside)


# Sizes are arguments of kernels that are compiled once for all of them; Triton looks at which are multiples of 16.
rows_kernel: Any = triton.jit(_rows, do_not_specialize=["rows", "ignore"])
gradient_kernel: Any = triton.jit(_gradient, do_not_specialize=["rows", "ignore", "blocks", "grad_stride"])

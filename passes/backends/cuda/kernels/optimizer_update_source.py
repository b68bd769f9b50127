"""The Triton source of an optimizer's update of many tensors: a chunk of one tensor per program, each value read once.

Before: a check, an unscaling, a clipping, an update and a cast, each of which reads and writes all of memory.
After: two kernels: one computes the factors of each tensor, one updates its elements. The rules are those of
``optim/update_kernel.c``, operation by operation.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl

# The rows of a table, int64 [9, count], which precede the options, fp64 in the bits of int64.
START = tl.constexpr(0)  # the number of the tensor's first chunk
SIZE = tl.constexpr(1)
VALUE = tl.constexpr(2)  # from here on addresses
GRAD = tl.constexpr(3)
FIRST = tl.constexpr(4)
SECOND = tl.constexpr(5)
LARGEST = tl.constexpr(6)
STEP = tl.constexpr(7)
LOW = tl.constexpr(8)
OPTIONS = tl.constexpr(9)
FACTORS = tl.constexpr(12)  # fp32 factors of a tensor


def _owner_source(table, program, count):
    """Return the number of the tensor that has the chunk ``program``: the last one whose chunks begin at or before."""
    number = program * 0
    end = number + count
    while number + 1 < end:
        middle = (number + end) // 2
        is_before = tl.load(table + START * count + middle) <= program
        number = tl.where(is_before, middle, number)
        end = tl.where(is_before, end, middle)
    return number


def _address_source(table, ROW: tl.constexpr, number, count, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer in row ``ROW``. ALIGNED: all of them are multiples of 16."""
    word = tl.load(table + ROW * count + number)
    if DTYPE == "bf16":
        at = word.to(tl.pointer_type(tl.bfloat16))
    elif DTYPE == "fp16":
        at = word.to(tl.pointer_type(tl.float16))
    else:
        at = word.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return at


def _read_source(at, inside, MASKED: tl.constexpr):
    if MASKED:
        found = tl.load(at, mask=inside, other=0.0)
    else:
        found = tl.load(at)
    return found


def _write_source(at, found, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, found.to(at.dtype.element_ty), mask=inside)
    else:
        tl.store(at, found.to(at.dtype.element_ty))


owner: Any = triton.jit(_owner_source)
address: Any = triton.jit(_address_source)
read: Any = triton.jit(_read_source)
write: Any = triton.jit(_write_source)


def _option_source(table, count, NUMBER: tl.constexpr):
    return tl.load(table + OPTIONS * count + NUMBER).to(tl.float64, bitcast=True)


option: Any = triton.jit(_option_source)


def _prepare(
    table, factors, lr, unscale, clip, count,
    RULE: tl.constexpr, DECOUPLED: tl.constexpr, COUNTED: tl.constexpr, RATED: tl.constexpr,
    UNSCALED: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Write the factors of a tensor, fp32 [count, 12], computed in fp64. RATED: the rate is in ``lr``."""
    number = tl.program_id(0)
    if RATED:
        base = tl.load(lr).to(tl.float64)
    else:
        base = option(table, count, 0)
    weight_decay = option(table, count, 1)
    beta1 = option(table, count, 3)
    beta2 = option(table, count, 4)
    step = base * 0.0 + 1.0
    if COUNTED:
        step += tl.load(address(table, STEP, number, count, "fp32", False)).to(tl.float64)
    rate = base
    root = step * 0.0 + 1.0
    first = option(table, count, 5)  # momentum
    if RULE == "adam":
        rate = base / (1.0 - tl.exp(step * tl.log(beta1)))
        root = tl.sqrt(1.0 - tl.exp(step * tl.log(beta2)))
        first = 1.0 - beta1
    if RULE == "adagrad":
        rate = base / (1.0 + (step - 1.0) * option(table, count, 6))
    keep = step * 0.0 + 1.0
    if DECOUPLED:
        keep = 1.0 - base * weight_decay
    by_scale = 1.0
    if UNSCALED:
        by_scale = tl.load(unscale)
    by_norm = 1.0
    if CLIPPED:
        by_norm = tl.load(clip)
    own = factors + number * FACTORS
    tl.store(own, by_scale)
    tl.store(own + 1, by_norm)
    tl.store(own + 2, option(table, count, 8).to(tl.float32))  # limit
    tl.store(own + 3, option(table, count, 7).to(tl.float32))  # sign
    tl.store(own + 4, weight_decay.to(tl.float32))
    tl.store(own + 5, keep.to(tl.float32))
    tl.store(own + 6, first.to(tl.float32))
    tl.store(own + 7, (1.0 - beta2).to(tl.float32))
    tl.store(own + 8, beta2.to(tl.float32))
    tl.store(own + 9, root.to(tl.float32))
    tl.store(own + 10, option(table, count, 2).to(tl.float32))  # eps
    tl.store(own + 11, (-rate).to(tl.float32))


def _chunk_source(
    value, grad, first, second, largest, low, own, place, inside,
    RULE: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    CLAMPED: tl.constexpr, ROUNDED: tl.constexpr, STORED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the elements at ``place``. STORED: the gradients, unscaled, are written as well."""
    g = read(grad + place, inside, MASKED).to(tl.float32) * tl.load(own)
    if STORED:
        write(grad + place, g, inside, MASKED)
    g *= tl.load(own + 1)
    if CLAMPED:
        limit = tl.load(own + 2)
        g = tl.where(g < -limit, -limit, g)  # NaN stays
        g = tl.where(g > limit, limit, g)
    g *= tl.load(own + 3)
    p = read(value + place, inside, MASKED)
    if DECAY:
        g += p * tl.load(own + 4)
    eps = tl.load(own + 10)
    rate = tl.load(own + 11)
    if RULE == "adam":
        weight = tl.load(own + 6)
        m = read(first + place, inside, MASKED)
        near = weight < 0.5
        m = tl.where(near, m, g) + tl.where(near, weight, weight - 1.0) * (g - m)
        v = read(second + place, inside, MASKED) * tl.load(own + 8) + (tl.load(own + 7) * g) * g
        write(first + place, m, inside, MASKED)
        write(second + place, v, inside, MASKED)
        square = v
        if AMSGRAD:
            most = read(largest + place, inside, MASKED)
            square = tl.where(most > v, most, v)
            square = tl.where(most != most, most, square)
            write(largest + place, square, inside, MASKED)
        p = p * tl.load(own + 5) + tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(square), tl.load(own + 9)) + eps)
    elif RULE == "adagrad":
        total = read(first + place, inside, MASKED) + g * g
        write(first + place, total, inside, MASKED)
        p += tl.div_rn(rate * g, tl.sqrt_rn(total) + eps)
    else:
        if MOMENTUM:
            momentum = tl.load(own + 6)
            m = read(first + place, inside, MASKED) * momentum + g
            write(first + place, m, inside, MASKED)
            g = m * momentum + g if NESTEROV else m
        p += rate * g
    write(value + place, p, inside, MASKED)
    if ROUNDED:
        write(low + place, p, inside, MASKED)


update_chunk: Any = triton.jit(_chunk_source)


def _update(
    table, factors, found_inf, count,
    RULE: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    CLAMPED: tl.constexpr, FOUND: tl.constexpr, STORED: tl.constexpr,
    GRADS: tl.constexpr, LOWS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a chunk of ``BLOCK`` elements; with ``found_inf`` above 0 only copies are written, of unchanged values.

    GRADS, LOWS: the dtypes of gradients and copies, "fp32", "bf16" or "fp16"; LOWS is "" without copies.
    """
    program = tl.program_id(0)
    number = owner(table, program, count)
    start = (program - tl.load(table + START * count + number)) * BLOCK
    size = tl.load(table + SIZE * count + number)
    place = start + tl.arange(0, BLOCK)
    inside = place < size
    value = address(table, VALUE, number, count, "fp32", ALIGNED)
    grad = address(table, GRAD, number, count, GRADS, ALIGNED)
    first = value
    if RULE != "sgd" or MOMENTUM:
        first = address(table, FIRST, number, count, "fp32", ALIGNED)
    second = value
    if RULE == "adam":
        second = address(table, SECOND, number, count, "fp32", ALIGNED)
    largest = value
    if AMSGRAD:
        largest = address(table, LARGEST, number, count, "fp32", ALIGNED)
    low = value
    if LOWS != "":
        low = address(table, LOW, number, count, LOWS, ALIGNED)
    own = factors + number * FACTORS
    bad = 0.0
    if FOUND:
        bad = tl.load(found_inf)
    if bad > 0.0:
        if LOWS != "":
            write(low + place, read(value + place, inside, True), inside, True)
    elif start + BLOCK <= size:  # loads without a mask are vectors
        update_chunk(
            value, grad, first, second, largest, low, own, place, inside,
            RULE, DECAY, AMSGRAD, MOMENTUM, NESTEROV, CLAMPED, LOWS != "", STORED, False,
        )  # fmt: skip
    else:
        update_chunk(
            value, grad, first, second, largest, low, own, place, inside,
            RULE, DECAY, AMSGRAD, MOMENTUM, NESTEROV, CLAMPED, LOWS != "", STORED, True,
        )  # fmt: skip


def _look(table, squares, count, GRADS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sum of squares of a chunk of gradients, fp64 [programs]: finite where all of them are."""
    program = tl.program_id(0)
    number = owner(table, program, count)
    start = (program - tl.load(table + START * count + number)) * BLOCK
    size = tl.load(table + SIZE * count + number)
    place = start + tl.arange(0, BLOCK)
    grad = address(table, GRAD, number, count, GRADS, ALIGNED)
    if start + BLOCK <= size:
        g = read(grad + place, place < size, False).to(tl.float64)
        tl.store(squares + program, tl.sum(g * g, 0))
    else:
        g = read(grad + place, place < size, True).to(tl.float64)
        tl.store(squares + program, tl.sum(g * g, 0))


prepare_kernel: Any = triton.jit(_prepare, do_not_specialize=["lr", "unscale", "clip", "count"])
update_kernel: Any = triton.jit(_update, do_not_specialize=["found_inf", "count"])
look_kernel: Any = triton.jit(_look, do_not_specialize=["squares", "count"])

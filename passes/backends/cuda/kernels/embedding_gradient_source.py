"""The Triton source of the gradient of an embedding table: for each row, the sum of the gradients of its indices.

Before: a table of zeros, then sums that are written over some of its rows.
After: the indices are sorted, and each row of the table is written once. Every sum is in the order of the indices, so
equal calls give equal bits. A row of many indices is summed in parts of ``PART``, each by a program of its own.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import triton
import triton.language as tl


def _sum(total, grad, order, first, last, length, stride, column, inside, ROWS: tl.constexpr):
    """Return ``total`` and the gradients of the indices at places ``first`` to ``last``, [columns] in fp32."""
    for place in range(first, last, ROWS):
        places = place + tl.arange(0, ROWS)
        found = places < last
        row = tl.load(order + places, mask=found, other=0).to(tl.int64) // length
        mask = found[:, None] & inside[None, :]
        x = tl.load(grad + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    return total


_sum_rows: Any = triton.jit(_sum)


def _parts(
    grad, order, ids, parts,
    width, blocks, length, stride,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of ``PART`` gradients to a row of ``parts``, fp32, where all of them have one index.

    ids: the indices in order; order: where each of them was. length: indices per row of ``grad``.
    """
    program = tl.program_id(0).to(tl.int64)
    part = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = part * PART
    if tl.load(ids + first) == tl.load(ids + first + (PART - 1)):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        total = _sum_rows(total, grad, order, first, first + PART, length, stride, column, inside, ROWS)
        tl.store(parts + part * width + column, total, mask=inside)


def _table(
    grad, order, starts, parts, base, table,
    width, blocks, length, stride, padding,
    BASED: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block of a row of ``table``, fp32 [rows, width]: the sum of its gradients, and of its row of ``base``.

    starts: where the indices of each row start, and their number. padding: the row whose indices have no gradient.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = tl.load(starts + row).to(tl.int64)
    last = tl.load(starts + row + 1).to(tl.int64)
    last = tl.where(row == padding, first, last)
    offset = row * width + column
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if BASED:
        total += tl.load(base + offset, mask=inside, other=0.0).to(tl.float32)
    whole = (first + (PART - 1)) // PART  # the first part whose indices are all of this row
    after = last // PART
    apart = whole < after
    until = tl.where(apart, whole * PART, last)
    total = _sum_rows(total, grad, order, first, until, length, stride, column, inside, ROWS)
    for place in range(tl.where(apart, whole, after), after, ROWS):
        places = place + tl.arange(0, ROWS)
        mask = (places < after)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + places[:, None] * width + column[None, :], mask=mask, other=0.0), 0)
    since = tl.where(apart, after * PART, last)
    total = _sum_rows(total, grad, order, since, last, length, stride, column, inside, ROWS)
    tl.store(table + offset, total, mask=inside)


parts_kernel: Any = triton.jit(_parts, do_not_specialize=["blocks", "length"])
table_kernel: Any = triton.jit(_table, do_not_specialize=["blocks", "length", "padding"])

"""Sizes from which on Triton kernels are chosen on CUDA, by the bytes that they save: none was timed.

Before: a kernel for whatever fits it. After: ``if cross_entropy_kernel_is_profitable("cuda", ...)``. Rates are those of
an H100, 2.9 TB/s; ``benchmarks/gpu/kernels.py`` measures each kernel against torch's operations.
"""

from __future__ import annotations

import torch

from amp_graph.passes.graph.node_info import HALVES

# A program takes a row, and a GPU has some 130 multiprocessors. 0.1 ms is as long as twenty launches.
FEWEST_LOGITS, FEWEST_ROWS = 1 << 23, 256


def cross_entropy_kernel_is_profitable(device: str, dtype: torch.dtype, rows: int, classes: int) -> bool:
    """Say whether one pass over low-precision logits in each direction beats ``cross_entropy(logits.float())``.

    6 bytes per logit instead of some 40: 0.1 ms for 8 million logits. A call has some ten launches more, for numbers
    per row.
    """
    return device == "cuda" and dtype in HALVES and rows >= FEWEST_ROWS and rows * classes >= FEWEST_LOGITS


# A row is held in registers, by one warp at least; 32 warps hold 16 numbers of it per thread.
NARROWEST, WIDEST = 128, 16384
FEWEST_NORMED = 1 << 22


def norm_kernel_is_profitable(device: str, elements: int, width: int) -> bool:
    """Say whether a residual sum, a norm of rows of ``width`` and their casts are faster as one kernel.

    Some 12 bytes an element instead of 24 in forward, 14 instead of 30 in backward: 40 us for 4 million elements, and
    one launch each instead of three.
    """
    return device == "cuda" and NARROWEST <= width <= WIDEST and elements >= FEWEST_NORMED


# Bytes from which on a call of ours, with its launches and its Python, is worth it: 23 us, as long as five launches.
LEAST_SPARED = 1 << 26


def bytes_of_embedding_gradient(ids: int, rows: int, width: int, low: bool, tied: bool) -> int:
    """Return the bytes that one write of an embedding's gradient spares, of a table of ``rows``.

    fp32 rows that are written as zeros and again as sums: 4 a number, of as many as there are ``ids``. ``low``: the
    gradient is not upcast, which is 2 + 4 bytes, and 2 fewer are read. ``tied``: the low-precision gradient that a
    product has for the same table is not upcast (4), no table of zeros is written (4), and the two are not added (8).
    """
    return width * (4 * min(ids, rows) + 8 * ids * low + 16 * rows * tied)


def embedding_kernel_is_profitable(device: str, spared: int) -> bool:
    """Say whether the gradient of an embedding by one kernel, which spares so many bytes, is faster than torch's."""
    return device == "cuda" and spared >= LEAST_SPARED

"""A custom operator, in C, for the gradient of an embedding table as the rows that were read.

Before: ``add(embedding_dense_backward(g, ids), _embedding_bag_backward(h, more, offsets))``, two tables of zeros and
their sum. After: ``gradient_rows([g, h], [ids, more], [None, offsets])``, the rows alone and where each is.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.native_update_ops import addresses, library, place
from amp_graph.passes.native.operator_library import OPS as OPS  # re-exported for callers
from amp_graph.passes.native.operator_library import define_as_typed
from amp_graph.passes.torch_compat.storage import address_of


def gradient_rows(
    grads: list[Tensor],
    ids: list[Tensor],
    offsets: list[Tensor | None],
    paddings: list[int],
    table: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Return the sum of embedding gradients without a dense table: the slot of each row, and the rows.

    For each reader of the table: grads: fp32, [*, width], ids: integers, [*]; or, for sum bags, grads [bags, width],
    ids [elements], and ``offsets``: integers, the start of each bag. paddings: a row without a gradient, or -1.
    slots: int32, [table], -1 for rows not in ``ids``. rows: fp32; only those that slots refer to are written.
    """
    width, total = grads[0].shape[-1], sum(i.numel() for i in ids)
    slots, rows = torch.full((table,), -1, dtype=torch.int32), torch.empty(min(total, table), width)
    kernel, used = _gather(rule), 0
    for one in zip(grads, ids, offsets, paddings, strict=True):
        words, _kept = _read(*one)
        used = kernel(place(words), width, table, used, address_of(slots), address_of(rows))
    return slots, rows


@lru_cache
def _gather(rule: str) -> Any:
    kernel = library(rule).gather
    kernel.restype, number, pointer = ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = (pointer, number, number, number, pointer, pointer)
    return kernel


def _read(grad: Tensor, ids: Tensor, offsets: Tensor | None, padding: int) -> tuple[array[int], tuple[Any, ...]]:
    """Return C's struct Read, and the tensors that it points to."""
    flat, given = ids.long().contiguous(), grad.reshape(grad.numel() // max(1, grad.shape[-1]), grad.shape[-1])
    given = given if given.stride(1) == 1 else given.contiguous()
    begins = None if offsets is None else offsets.long().contiguous()
    count = 0 if begins is None else len(begins)
    sizes = (count, flat.numel(), padding)
    words = (address_of(given), given.stride(0), len(given), *addresses((begins, flat)), *sizes)
    return array("q", words), (flat, given, begins)


def _fake(grads: list[Tensor], ids: list[Tensor], table: int) -> tuple[Tensor, Tensor]:
    slots = grads[0].new_empty(table, dtype=torch.int32)
    return slots, grads[0].new_empty(min(sum(i.numel() for i in ids), table), grads[0].shape[-1])


define_as_typed(gradient_rows, _fake)

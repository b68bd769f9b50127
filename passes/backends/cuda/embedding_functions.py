"""Embeddings whose backward reads the gradient in the precision that it comes in, and writes the table's once.

Before: ``embedding(ids, table).bfloat16()``, and ``table.bfloat16()`` for the product that reads the same table.
After: ``rows, low = tied_rows(table, ids, ...)``, whose gradients are added in one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.memory.gradient_buffers import has_own_backward, plain_rows, spread
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.double_backward import is_plain

own_functions(__name__)


def low_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool, dtype: torch.dtype) -> Tensor:
    """Return ``F.embedding(ids, weight, padding)``, or the sum of each bag ``ids[i]`` of its rows, in ``dtype``."""
    if not has_own_backward(weight, ids):
        return plain_rows(weight, ids, padding, bags).to(dtype)
    found: Tensor = _Rows.apply(weight, ids, padding, bags, dtype, None)
    return found


def tied_rows(
    weight: Tensor, ids: Tensor, padding: int | None, bags: bool, dtype: torch.dtype, low: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return what ``low_rows`` does, and ``weight`` in the precision ``low``."""
    if not has_own_backward(weight, ids):
        return plain_rows(weight, ids, padding, bags).to(dtype), weight.to(low)
    found: tuple[Tensor, Tensor] = _Rows.apply(weight, ids, padding, bags, dtype, low)
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        padding: int | None,
        bags: bool,
        dtype: torch.dtype,
        low: torch.dtype | None,
    ) -> Any:
        ctx.save_for_backward(ids)
        ctx.count, ctx.bags = weight.shape[0], bags
        ctx.padding = -1 if padding is None else padding % weight.shape[0]
        ctx.set_materialize_grads(False)
        rows = plain_rows(weight, ids, padding, bags).to(dtype)
        return rows if low is None else (rows, weight.to(low))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_low: Tensor | None = None) -> Any:
        (ids,) = ctx.saved_tensors
        nothing = (None,) * 5
        if grad is None:
            return None if of_low is None else of_low.float(), *nothing
        if is_plain(grad, of_low):
            rows, flat = spread(grad, ids, ctx.bags)
            table = torch.ops.aten.embedding_dense_backward(rows.float(), flat, ctx.count, ctx.padding, False)
            return table if of_low is None else table + of_low, *nothing
        return OPS.embedding_gradient(grad, ids, ctx.count, ctx.padding, of_low), *nothing

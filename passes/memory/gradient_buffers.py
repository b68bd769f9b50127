"""Gradients of large embedding tables in reused memory, and embeddings whose backward writes into it.

Before: ``embedding_bag(ids, table)``, whose backward zeroes a new table-sized buffer at each step, page by page.
After: ``table_rows(table, ids)``, which clears the memory of the last gradient once nobody holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.profitability.thresholds import adding_by_place_is_profitable
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.storage import bytes_of, storage_holders, storage_of

own_functions(__name__)

_SOLE = storage_holders(torch.empty(1))  # reference count of memory that one tensor has


class GradientMemory:
    """One CPU tensor for each parameter, of which its gradients are aliases.

    It is cleared and reused only when no alias of it is left: not while ``.grad``, or anything made from it without a
    copy, is held. It lives as long as the model's conversion.
    """

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}
        self.rows = self._reader()

    def zeros_like(self, weight: Tensor) -> Tensor:
        """Return dense zeros of the shape and dtype of ``weight`` that nothing else reads or writes."""
        own = self._last.pop(id(weight), None)  # no other thread finds it now
        if own is None or (own.shape, own.dtype) != (weight.shape, weight.dtype) or not is_free(own):
            own = _zeros(weight)
        else:
            own.zero_()
        given = own.detach()
        self._last[id(weight)] = own
        return given

    def drop(self) -> int:
        """Release the memory and return how many bytes it was; gradients that are still held stay valid."""
        size = sum(bytes_of(t) for t in self.tensors)
        self._last.clear()
        return size

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that is kept."""
        return list(self._last.values())

    def _reader(self) -> Callable[..., Tensor]:
        def table_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
            """Return ``F.embedding(ids, weight, padding)``, or the sum of each bag ``ids[i]`` of its rows."""
            return _rows(weight, ids, padding, bags, self.zeros_like)

        return table_rows


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape, dtype=weight.dtype)


def _rows(
    weight: Tensor, ids: Tensor, padding: int | None, bags: bool, zeros_like: Callable[[Tensor], Tensor]
) -> Tensor:
    if not has_own_backward(weight, ids):
        return plain_rows(weight, ids, padding, bags)
    found: Tensor = _Rows.apply(weight, ids, padding, bags, zeros_like)
    return found


def is_free(own: Tensor) -> bool:
    """Say whether no other tensor, storage or array holds the memory, and it is still private and whole."""
    storage = storage_of(own)
    whole = storage.nbytes() == own.element_size() * own.numel()
    del storage  # which would be counted
    return whole and storage_holders(own) == _SOLE and not storage_of(own).is_shared()


def has_own_backward(weight: Tensor, ids: Tensor) -> bool:
    """Say whether ``weight`` gets its gradient by ``add_rows``; transforms need torch's own operations."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return False
    return not leaves_to_torch(weight, ids)


def plain_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
    """Return ``F.embedding(ids, weight, padding)``, or the sum of each bag ``ids[i]`` of its rows."""
    if bags:
        return F.embedding_bag(ids, weight, mode="sum", padding_idx=padding)
    return F.embedding(ids, weight, padding)


def spread(grad: Tensor, ids: Tensor, bags: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of each row that was read, [ids, width], and all ``ids`` flattened."""
    rows = grad.unsqueeze(1).expand(*ids.shape, -1) if bags else grad
    return rows.reshape(ids.numel(), grad.shape[-1]), ids.reshape(-1)


def add_rows(table: Tensor, grad: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Add rows to the zeros of ``table`` in place, except for the row ``padding`` (negative: none); return it.

    grad: [*ids.shape, width]; or [bags, width] for ``ids`` [bags, length], where each id gets its bag's row: if
    profitable, these rows are added position by position instead of being expanded.
    """
    bags = grad.dim() == ids.dim()
    if bags and adding_by_place_is_profitable(grad.numel()):
        grad = grad.contiguous()
        for one in ids.t().contiguous():
            table.index_add_(0, one, grad)
    else:
        rows, flat = spread(grad, ids, bags)
        table.index_add_(0, flat, rows)
    if padding >= 0:
        table[padding].zero_()
    return table


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, bags: bool, zeros_like: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # not saved: it may be updated before the backward, whose gradient does not depend on it
        ctx.padding, ctx.bags, ctx.zeros_like = padding, bags, zeros_like
        return plain_rows(weight, ids, padding, bags)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding % len(ctx.weight)
        if is_plain(grad):
            rows, flat = spread(grad, ids, ctx.bags)
            table = torch.ops.aten.embedding_dense_backward(rows, flat, len(ctx.weight), padding, False)
            return table, None, None, None, None
        table = add_rows(ctx.zeros_like(ctx.weight), grad, ids, padding)
        return table, None, None, None, None

"""Gradients of large embedding tables in memory that is reused between steps.

Before: ``embedding_bag(ids, table)``, whose backward zeroes a new table-sized buffer at each step, page by page.
After: ``table_rows(table, ids)``, whose backward is ``amp_graph::table_gradient``: it clears the memory of the last
gradient once nobody holds it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_operator
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.storage import storage_holders, storage_of

# Elements of the gradients of embedding bags below which one call per position of a bag costs more than it saves.
# Speedups, CPU, bags of 4 to 100 positions, widths of 64 and 256: 1.2 to 2 from 16,384 elements of all bags on, 4.5 if
# the expanded gradients would be paged in again; 0.4 to 0.7 below.
LEAST_BY_PLACE = 1 << 14
_SOLE = storage_holders(torch.empty(1))  # reference count of memory that one tensor has


class Pool:
    """A pool of fp32 CPU tensors of which the gradients of tables are aliases.

    One per process, because compiled code may come from a file cache and knows no model. A buffer is handed out, as an
    alias, only when no other alias of it is left. The pool keeps at most as many buffers per shape as a graph has
    tables of that shape, and none after the models that asked for them are gone.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], list[Tensor]] = {}
        self._room: Counter[tuple[int, ...]] = Counter()
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def reserve(self, tables: Mapping[tuple[int, ...], int], user: object) -> None:
        """Keep memory for this many ``tables`` of each shape, for as long as ``user`` lives."""
        self._room |= Counter(tables)
        if user not in self._users:
            self._users.add(user)
            weakref.finalize(user, self._release_unused).atexit = False

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros, fp32 [rows, width], that nothing else reads or writes."""
        kept, own = self._kept.setdefault(shape, []), None
        for _ in range(len(kept)):
            found = kept.pop(0) if kept else None  # no other thread finds it now
            if found is not None and is_free(found):
                own = found.zero_()
                break
            kept += [] if found is None else [found]
        own = torch.zeros(shape) if own is None else own
        if len(kept) < self._room[shape]:
            given = own.detach()
            kept.append(own)
            return given
        return own

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that is kept."""
        return [t for kept in self._kept.values() for t in kept]

    def leave(self, user: object) -> None:
        """Release the memory if ``user`` was the last for whom it was kept; gradients that are held stay valid."""
        self._users.discard(user)
        self._release_unused()

    def _release_unused(self) -> None:
        if not list(self._users):  # its length includes users that are about to leave
            self._room.clear()
            self._kept.clear()


POOL = Pool()


def is_free(own: Tensor) -> bool:
    """Say whether no other tensor, storage or array holds the memory, and it is still private and whole."""
    storage = storage_of(own)
    whole = storage.nbytes() == own.element_size() * own.numel()
    del storage  # which would be counted
    return whole and storage_holders(own) == _SOLE and not storage_of(own).is_shared()


def plain_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
    """Return the same by torch's own functions."""
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
    if bags and grad.numel() >= LEAST_BY_PLACE:
        grad = grad.contiguous()
        for one in ids.t().contiguous():
            table.index_add_(0, one, grad)
    else:
        rows, flat = spread(grad, ids, bags)
        table.index_add_(0, flat, rows)
    if padding >= 0:
        table[padding].zero_()
    return table


def table_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
    """Return ``F.embedding(ids, weight, padding)``, or the sum of each bag ``ids[i]`` of its rows."""
    if not (torch.is_grad_enabled() and weight.requires_grad) or leaves_to_torch(weight, ids):
        return plain_rows(weight, ids, padding, bags)
    found: Tensor = _Rows.apply(weight, ids, padding, bags)
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.count, ctx.bags = weight.shape[0], bags
        ctx.padding = -1 if padding is None else padding % weight.shape[0]
        return plain_rows(weight, ids, padding, bags)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        rows, flat = spread(grad, ids, ctx.bags)  # in compiled code, which writes them along with something else
        if is_plain(grad):
            table = torch.ops.aten.embedding_dense_backward(rows, flat, ctx.count, ctx.padding, False)
        else:
            table = OPS.table_gradient(rows, flat, ctx.count, ctx.padding)
        return table, None, None, None


def _table_gradient(rows: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    wide = rows.dtype != torch.float32  # no table that a pass replaces
    return add_rows(
        rows.new_zeros(count, rows.shape[1]) if wide else POOL.zeros(count, rows.shape[1]), rows, ids, padding
    )


define_operator(
    "table_gradient(Tensor rows, Tensor ids, SymInt count, int padding) -> Tensor",
    _table_gradient,
    lambda rows, ids, count, padding: rows.new_empty(count, rows.shape[1]),
)

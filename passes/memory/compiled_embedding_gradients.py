"""Gradients of large embedding tables in compiled graphs, in memory that is reused between steps.

Before: ``embedding_bag(ids, table)``, whose compiled backward zeroes a new table-sized buffer at each step, page by
page.
After: ``compiled_rows(table, ids)``, whose backward is ``amp_graph::table_gradient``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.memory.gradient_buffers import add_rows, has_own_backward, is_free, plain_rows, spread
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.torch_compat.double_backward import is_plain
from amp_graph.passes.torch_compat.storage import bytes_of


class Pool:
    """A pool of fp32 CPU tensors of which the gradients that compiled code makes are aliases.

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
            weakref.finalize(user, self._left).atexit = False

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

    def drop(self) -> int:
        """Release the memory and return how many bytes it was; gradients that are still held stay valid."""
        size = sum(bytes_of(t) for t in self.tensors)
        self._kept.clear()
        return size

    @property
    def tensors(self) -> list[Tensor]:
        """The memory that is kept."""
        return [t for kept in self._kept.values() for t in kept]

    def _left(self) -> None:
        if not list(self._users):  # its length includes users that are about to leave
            self._room.clear()
            self.drop()


POOL = Pool()


def compiled_rows(weight: Tensor, ids: Tensor, padding: int | None, bags: bool) -> Tensor:
    """Return ``F.embedding(ids, weight, padding)``, or the sum of each bag ``ids[i]`` of its rows."""
    if not has_own_backward(weight, ids):
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
    return add_rows(POOL.zeros(count, rows.shape[1]), rows, ids, padding)


def _fake(rows: Tensor, ids: Tensor, count: int, padding: int) -> Tensor:
    return rows.new_empty(count, rows.shape[1])


define_operator("table_gradient(Tensor rows, Tensor ids, SymInt count, int padding) -> Tensor", _table_gradient, _fake)
TABLE_GRADIENT = OPS.table_gradient.default

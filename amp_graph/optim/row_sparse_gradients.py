"""Rewrites dense gradients of embedding tables to the rows that were read, if the update supports that.

Before: ``add(embedding_dense_backward(g, ids), low.float())``, a dense table and an upcast one. After:
``gradient_rows([g], [ids])`` and ``low``, which ``one_pass_update_`` adds row by row.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.optim.row_sparse_gradient_op import OPS
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.edit import insert_call
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from amp_graph.passes.torch_compat.fake import numel
from amp_graph.passes.torch_compat.symbolic_sizes import is_contiguous

ATEN: Any = torch.ops.aten
READERS = (  # operators that accept rows, and the index of their gradients argument
    (OPS.one_pass_update_.default, 1),
    (OPS.look_at_gradients.default, 0),
    (OPS.add_gradients_.default, 1),
)
EMBEDDING, BAGS = ATEN.embedding_dense_backward.default, ATEN._embedding_bag_backward.default
SUMS, MEANS = 0, 1  # modes of bags


@dataclass(frozen=True)
class Read:
    """One gradient of a table: rows for ``ids``, or for bags of them that start at ``offsets``."""

    grad: Node
    ids: Node
    offsets: Node | None
    padding: int
    divisor: Node | None = None  # per bag, for means


@dataclass(frozen=True)
class Table:
    """A gradient that is the sum of embedding gradients and at most one dense gradient."""

    total: Node
    backwards: tuple[Node, ...]
    reads: tuple[Read, ...]
    dense: Node | None  # the dense gradient


def tables_of(gm: GraphModule, *, sparse: bool = False) -> list[int]:
    """Return the inputs of a captured graph that embeddings read as tables; ``sparse``: only sparse embeddings."""
    inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    calls = [(n, f) for f in (F.embedding, F.embedding_bag) for n in gm.graph.find_nodes(op="call_function", target=f)]
    given = [inspect.signature(f).bind(*n.args, **n.kwargs).arguments for n, f in calls]
    weights = [found["weight"] for found in given if not sparse or found.get("sparse") is True]
    return sorted({inputs[w] for w in weights if w in inputs})


@dataclass(frozen=True)
class RowSparseGradients(Pass):
    """Replaces the gradient of an embedding table with the rows that were read, if the update takes rows.

    Law: the rows are summed in fp32 in the order of ``ids``, then added to the dense gradient, as in the dense table.
    Exactness: rounding-equal.
    """

    name: ClassVar[str] = "row-sparse-gradients"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every gradient that an update reads."""
        readers = [(n, place) for n in gm.graph.nodes for target, place in READERS if n.target is target]
        tables = {total: found for n, place in readers for total in _grads(n, place) if (found := _table(total))}
        names = [total.name for total in tables]
        for table in tables.values():
            _rewrite(gm, table, readers)
        return PassResult(gm, tuple(Change("rows", "rows for a table", name, "an update reads rows") for name in names))


def _table(total: Node) -> Table | None:
    """Return the parts of ``total``, if these are rows of a table and at most one dense gradient."""
    summands = list(_summands(total))
    backwards = tuple(n for n in summands if n.target in (EMBEDDING, BAGS))
    reads = tuple(found for n in backwards if (found := _read(n)) is not None)
    others = [n for n in summands if n not in backwards]
    if not backwards or len(reads) < len(backwards) or len(others) > 1 or not _fits(total, backwards, reads):
        return None
    if others and 2 * sum(numel(value(r.ids)) for r in reads) > len(value(total)):
        return None
    return Table(total, backwards, reads, _unwidened(others[0]) if others else None)


def _summands(total: Node) -> Iterator[Node]:
    """Yield the summands of ``total``, descending into sums without other readers."""
    if total.target is not ATEN.add.Tensor or total.kwargs or len(total.all_input_nodes) != 2:
        yield total
        return
    for node in total.all_input_nodes:
        yield from _summands(node) if len(node.users) == 1 else (node,)


def _read(backward: Node) -> Read | None:
    """Return the rows that ``backward`` sums, if they are unscaled or, for means, divided."""
    given: Any = backward.args
    if backward.target is EMBEDDING:
        grad, ids, _, padding, by_frequency = given
        return None if by_frequency else Read(grad, ids, None, padding)
    grad, ids, offsets, _, sizes, _, _, by_frequency, mode, sparse, weights, *padding = given
    if by_frequency or sparse or weights is not None or mode not in (SUMS, MEANS):
        return None
    return Read(grad, ids, offsets, padding[0] if padding else -1, sizes if mode == MEANS else None)


def _fits(total: Node, backwards: tuple[Node, ...], reads: tuple[Read, ...]) -> bool:
    """Return whether all is contiguous fp32, and read by the update only."""
    alike = all(value(n).dtype == torch.float32 and is_contiguous(value(n)) for n in (*backwards, total))
    own = all(n is total or len(n.users) == 1 for n in backwards)
    taken = all(any(user.target is target for target, _ in READERS) for user in total.users)
    return alike and own and taken and all(value(r.grad).dtype == torch.float32 for r in reads)


def _unwidened(dense: Node) -> Node:
    """Return the source of ``dense`` if that is an upcast and the update can read the source."""
    source = dense.all_input_nodes[0] if dense.target is ATEN._to_copy.default else dense
    fits = value(source).dtype.itemsize == 2 and is_contiguous(value(source))
    return source if fits else dense


def _rewrite(gm: GraphModule, table: Table, readers: list[tuple[Node, int]]) -> None:
    using = [(n, place) for n, place in readers if table.total in _grads(n, place)]
    slots, rows = _made(gm, table, _rule(using[0][0]))
    for node, place in using:
        grads = _grads(node, place)
        number = grads.index(table.total)
        grads[number] = rows if table.dense is None else table.dense
        node.args = (*node.args[:place], grads, *node.args[place + 1 :])
        known: dict[str, Any] = {k: node.kwargs.get(k) or [] for k in ("rows", "with_rows", "alone")}
        alone = [number] if table.dense is None else []
        more: dict[str, list[Any]] = {"rows": [slots, rows], "with_rows": [number], "alone": alone}
        node.kwargs = {**node.kwargs, **{k: [*known[k], *more[k]] for k in known}}
    _erase(gm, table.total)


def _grads(reader: Node, place: int) -> list[Node]:
    found: Any = reader.args[place]
    return list(found)


def _rule(reader: Node) -> str:
    found: Any = reader.kwargs.get("rule") or reader.args[-1]
    return found


def _made(gm: GraphModule, table: Table, rule: str) -> tuple[Node, Node]:
    """Insert the rows after the last of the gradients that they replace."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    before = max(table.backwards, key=order.__getitem__)
    columns = [list(c) for c in zip(*((_divided(gm, before, r), r.ids, r.offsets) for r in table.reads), strict=True)]
    paddings = [r.padding for r in table.reads]
    args = (*columns, paddings, len(value(table.total)), rule)
    both = _inserted(gm, before, OPS.gradient_rows.default, *args)
    slots, rows = (_inserted(gm, before, operator.getitem, both, i) for i in range(2))
    return slots, rows


def _divided(gm: GraphModule, before: Node, read: Read) -> Node:
    if read.divisor is None:
        return read.grad
    counts = _inserted(gm, before, ATEN.clamp_min.default, read.divisor, 1)  # empty bags have no rows
    return _inserted(gm, before, ATEN.div.Tensor, read.grad, _inserted(gm, before, ATEN.unsqueeze.default, counts, 1))


def _inserted(gm: GraphModule, before: Node, target: Any, *args: Any) -> Node:
    mode = fake_mode_of(gm)
    assert mode is not None, "a step is traced on fake tensors"
    return insert_call(before, mode, target, *args)


def _erase(gm: GraphModule, node: Node) -> None:
    """Erase dead nodes: sums, dense tables and upcast gradients."""
    if node.users or node.target not in (ATEN.add.Tensor, ATEN._to_copy.default, EMBEDDING, BAGS):
        return
    sources = list(node.all_input_nodes)
    gm.graph.erase_node(node)
    for source in sources:
        _erase(gm, source)

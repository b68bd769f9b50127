"""Gradients of tables as the rows that were read, where the update can take them so.

Before: ``add(embedding_dense_backward(g, ids), low.float())``, a table of zeros and a widened one. After:
``gradient_rows(g, ids)`` and ``low``, which ``one_pass_update_`` adds up row by row.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.one_pass_ops import OPS
from amp_graph.passes.node_value import fake_mode_of, run_node, value

ATEN: Any = torch.ops.aten
READERS = (  # operators that take gradients with rows, and the place of gradients among their arguments
    (OPS.one_pass_update_.default, 1),
    (OPS.look_at_gradients.default, 0),
    (OPS.add_gradients_.default, 1),
)


@dataclass(frozen=True)
class Table:
    """A gradient that is, or that adds, the gradient of an embedding."""

    total: Node
    backward: Node  # embedding_dense_backward
    dense: Node | None  # what it is added to


def rows_instead_of_tables(gm: GraphModule) -> int:
    """Rewrite every gradient that fits; return how many.

    Law: the rows are added up in fp32 in the order of ``ids``, then to the dense gradient, as in the table. Exactness:
    rounding-equal.
    """
    readers = [(n, place) for n in gm.graph.nodes for target, place in READERS if n.target is target]
    tables = {total: found for n, place in readers for total in _grads(n, place) if (found := _table(total))}
    for table in tables.values():
        _rewrite(gm, table, readers)
    return len(tables)


def _table(total: Node) -> Table | None:
    """Return what ``total`` is made of, if the rows of a table are a part of it and few."""
    backwards = [n for n in _summands(total) if n.target is ATEN.embedding_dense_backward.default]
    if len(backwards) != 1 or not _is_small(backwards[0], total):
        return None
    others = [n for n in _summands(total) if n is not backwards[0]]
    if not others:
        return Table(total, backwards[0], None)
    return Table(total, backwards[0], _unwidened(others[0])) if len(others) == 1 else None


def _summands(total: Node) -> list[Node]:
    if total.target is ATEN.add.Tensor and not total.kwargs and len(total.all_input_nodes) == 2:
        return list(total.all_input_nodes)
    return [total]


def _is_small(backward: Node, total: Node) -> bool:
    """Say whether the table is read by few, in rows of fp32 that lie one behind the other, and by nobody else."""
    given: Any = backward.args
    grad, ids, rows, _, by_frequency = given
    alike = all(value(n).dtype == torch.float32 and value(n).is_contiguous() for n in (backward, total))
    own = backward is total or len(backward.users) == 1
    read = all(any(user.target is target for target, _ in READERS) for user in total.users)
    return (
        alike
        and own
        and read
        and not by_frequency
        and value(grad).dtype == torch.float32
        and (2 * value(ids).numel() <= rows)
    )


def _unwidened(dense: Node) -> Node:
    """Return what ``dense`` was cast from, where the update reads that."""
    source = dense.all_input_nodes[0] if dense.target is ATEN._to_copy.default else dense
    fits = value(source).dtype.itemsize == 2 and value(source).is_contiguous()
    return source if fits else dense


def _rewrite(gm: GraphModule, table: Table, readers: list[tuple[Node, int]]) -> None:
    given: Any = table.backward.args
    grad, ids, count, padding, _ = given
    using = [(n, place) for n, place in readers if table.total in _grads(n, place)]
    slots, rows = _made(gm, table.backward, grad, ids, count, padding, _rule(using[0][0]))
    for node, place in using:
        grads = _grads(node, place)
        number = grads.index(table.total)
        grads[number] = rows if table.dense is None else table.dense
        node.args = (*node.args[:place], grads, *node.args[place + 1 :])
        known: dict[str, Any] = {k: node.kwargs.get(k) or [] for k in ("rows", "with_rows", "alone")}
        alone = [number] if table.dense is None else []
        more: dict[str, list[Any]] = {"rows": [slots, rows], "with_rows": [number], "alone": alone}
        node.kwargs = {**node.kwargs, **{k: [*known[k], *more[k]] for k in known}}
    for node in _dead(table):
        gm.graph.erase_node(node)


def _grads(reader: Node, place: int) -> list[Node]:
    found: Any = reader.args[place]
    return list(found)


def _rule(reader: Node) -> str:
    found: Any = reader.kwargs.get("rule") or reader.args[-1]
    return found


def _made(gm: GraphModule, before: Node, *args: Any) -> list[Node]:
    mode = fake_mode_of(gm)
    assert mode is not None, "a step is traced on fake tensors"
    with gm.graph.inserting_before(before):
        both = gm.graph.call_function(OPS.gradient_rows.default, args)
        parts = [gm.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for node in (both, *parts):
        node.meta = {k: v for k, v in before.meta.items() if k != "val"}
        node.meta["val"] = run_node(node, mode)
    return parts


def _dead(table: Table) -> Iterator[Node]:
    others = [n for n in table.total.all_input_nodes if n.target is ATEN._to_copy.default]
    yield from dict.fromkeys((table.total, table.backward))
    yield from (n for n in others if not n.users)

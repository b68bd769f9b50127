"""Reads a captured graph's nodes into the records of a report.

Before: ``Captured`` (a GraphModule whose nodes carry marks). After: ``GraphReport``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.capture.captured_graphs import Captured
from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.graph_text import SHORT, graph_text, target_text, type_text
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import (
    BUDGET,
    CAST,
    INPUT,
    LEFT_ALONE,
    MARK,
    PREDICTED,
    SPARED,
    UNPLANNED,
)
from amp_graph.passes.graph.node_bytes import size_of, writes_memory, written
from amp_graph.passes.manager import Timed
from amp_graph.passes.precision.op_cost import PICOSECONDS
from amp_graph.passes.precision.plan_precision import Mark
from amp_graph.passes.weights.batch_weight_casts import low_weight
from amp_graph.passes.weights.cast_weights import cast_weight
from amp_graph.passes.weights.frozen_weights import is_frozen
from amp_graph.report.records import ACTIVATION, WEIGHT, CastReport, GraphReport, NodeReport, Note, Predicted
from amp_graph.rewrite import Rewritten


@dataclass(frozen=True)
class Part:
    """A graph, or one inside it: its path (``wrap_body_0/``), and what the passes recorded.

    ``names`` are those of the lines of ``before``. ``kept`` are the nodes that stay in full precision because their
    kernel refused low operands, with its error.
    """

    path: str
    gm: GraphModule
    before: str
    passes: tuple[Timed, ...]
    kept: dict[str, str]
    names: tuple[str, ...] = ()


WANTED = "it stays low all the same: inputs are low, or the model's code or the policy asks for low precision"
UNMEASURED = "it stays low all the same: the rates are not of this machine; amp-graph calibrate measures them"


def read_graph(index: int, record: Captured, weights: Collection[str]) -> GraphReport:
    """Read one captured graph; ``weights`` are the names of the model's parameters and buffers."""
    low = record.rewritten.dtype
    parts = list(parts_of(record.rewritten))
    dtypes = {t.dtype for part in parts for n in part.gm.graph.nodes for t in tensors(captured(n))}
    held = weight_nodes(parts, weights)
    by_dtype, before = _activation_bytes(parts, held)
    return GraphReport(
        index,
        record.training,
        record.grad,
        SHORT[low],
        record.rewritten.before,
        graph_text(record.rewritten.gm),
        tuple(n for part in parts for _, n in node_reports(part, low)),
        tuple(c for part in parts for _, _, c in cast_reports(part, held)),
        tuple(n for part in parts for n in _changes(part.passes, "removed", part.path)),
        tuple(n for part in parts for n in _skips(part)),
        record.break_reason,
        record.break_line,
        by_dtype,
        before,
        torch.float32 in dtypes,
        any(d.is_floating_point or d.is_complex for d in dtypes),
        record.rewritten.gm.meta.get(BUDGET),
        _predicted(parts, record.rewritten.policy.leaves),
        sum(n.meta.get(SPARED, 0) for part in parts for n in part.gm.graph.nodes),
        tuple(Note(part.path, t.name, t.failure) for part in parts for t in part.passes if t.failure),
        "; ".join(part.gm.meta[UNPLANNED] for part in parts if UNPLANNED in part.gm.meta),
    )


def _predicted(parts: list[Part], leaves: str) -> Predicted | None:
    """Return the predicted time of all parts that contain low precision, or would."""
    found = [part.gm.meta[PREDICTED] for part in parts if PREDICTED in part.gm.meta]
    if not any(one.is_low for one in found):
        return None
    full = sum(one.full for one in found) or 1
    ratio, autocast = (sum(times) / full for times in ([p.planned for p in found], [p.autocast for p in found]))
    left = LEFT_ALONE in parts[0].gm.meta
    why = ""
    if leaves == "graphs" and not left:
        why = UNMEASURED if all(one.may_be_full for one in found) else WANTED
    return Predicted(ratio, found[0].machine, left, full / PICOSECONDS, autocast, why)


def parts_of(rewritten: Rewritten, path: str = "") -> Iterator[Part]:
    """Yield a rewritten graph and all its subgraphs."""
    kept = {note.node: note.reason for note in _changes(rewritten.passes, "kept full")}
    yield Part(path, rewritten.gm, rewritten.before, rewritten.passes, kept, rewritten.names)
    for name, gm in _called_graphs(rewritten.gm):
        if name in rewritten.bodies:
            yield from parts_of(rewritten.bodies[name], f"{path}{name}/")
        else:  # a body left as captured, or a checkpoint rebuilt from nodes of this graph
            yield Part(f"{path}{name}/", gm, "", (), kept)


def _called_graphs(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    for node in gm.graph.nodes:
        body = graph_read(gm, node)
        if body is not None:
            yield str(node.target), body


def is_cast(node: Node) -> bool:
    """Say whether ``node`` is a cast that the passes inserted."""
    ours = node.target in (low_weight, cast_weight, shared_cast) or is_frozen(node)
    return CAST in node.meta and (node.op == "call_method" or ours)


def cast_dtype(node: Node) -> torch.dtype:
    """Return the dtype that a cast converts to."""
    dtype: Any = node.args[1] if node.target is shared_cast else value(node).dtype
    assert isinstance(dtype, torch.dtype), "a cast is to a dtype"
    return dtype


def mark_of(node: Node) -> Mark | None:
    """Return the plan's mark on ``node``; None on plumbing, which may carry its producer's."""
    return None if is_part(node) else node.meta.get(MARK)


def numbered(gm: GraphModule) -> dict[Node, str]:
    """Return each node's number in the graph's text: ``%7``."""
    return {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}


def shown_name(node: Node) -> str:
    """Return a node's displayed name: an input's own name, or the node's name."""
    if node.op == "placeholder":
        return node_info.clean_path(str(node.meta.get(INPUT, node.target))) or node.name
    return str(node.target) if node.op == "get_attr" else node.name


def user_line(node: Node) -> str:
    """Return the user's source line of ``node``; "" if only a line of this package is recorded."""
    line = node_info.source_line(node)
    return "" if line.startswith(os.path.dirname(os.path.dirname(__file__)) + os.sep) else line


def precision_of(node: Node, low: torch.dtype) -> str:
    """Return "low", "full" or "captured": what the node computes in, or a cast converts to."""
    mark = mark_of(node)
    if mark is not None:
        return mark.precision
    return ("low" if cast_dtype(node) == low else "full") if is_cast(node) else "captured"


def node_reports(part: Part, low: torch.dtype) -> Iterator[tuple[Node, NodeReport]]:
    """Yield each computing node of ``part`` with its record."""
    numbers = numbered(part.gm)
    for node in part.gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        mark = mark_of(node)
        refused = part.kept.get(node.name, "")
        yield (
            node,
            NodeReport(
                part.path + node.name,
                part.path + numbers[node],
                mark.ops if mark and mark.ops else (target_text(node),),
                node_info.module_path(node),
                str(mark.cls) if mark else "cast" if is_cast(node) else "",
                "full" if refused else precision_of(node, low),
                refused or (mark.reason if mark else node.meta[CAST] if is_cast(node) else _unmarked(node)),
                mark.origin if mark else "",
                user_line(node),
                type_text(value(node)),
                type_text(captured(node)),
                mark is None or mark.listed,
            ),
        )


def _unmarked(node: Node) -> str:
    if is_part(node):
        return "takes one element of a tuple result"
    if any(source.op == "get_attr" and value(source) is None for source in node.all_input_nodes):
        return "runs a subgraph"
    return "in a subgraph that stays as captured" if tensors(value(node)) else "computes on no tensor"


def cast_reports(part: Part, held: Collection[Node]) -> Iterator[tuple[Node, Node, CastReport]]:
    """Yield each cast of ``part``: its source node, the cast node, and the record."""
    numbers = numbered(part.gm)
    for node in filter(is_cast, part.gm.graph.nodes):
        source = node.args[0]
        of = WEIGHT if source in held else ACTIVATION
        name, number = part.path + node.name, part.path + numbers[node]
        kept = is_frozen(node)
        told = CastReport(name, number, shown_name(source), of, SHORT[cast_dtype(node)], node.meta[CAST], kept)
        yield source, node, told


def weight_nodes(parts: list[Part], weights: Collection[str]) -> set[Node]:
    """Return the nodes that hold the model's parameters and buffers, in the graph and in its bodies."""
    held: set[Node] = set()
    for part in parts:
        names = {node.name for node in held}
        for node in part.gm.graph.nodes:
            is_leaf = node.op in ("placeholder", "get_attr")
            passed_in = node.op == "placeholder" and node.name in names  # a body's operand
            if is_leaf and (_is_parameter(node) or shown_name(node) in weights or passed_in):
                held.add(node)
    return held


def _is_parameter(node: Node) -> bool:
    return isinstance(captured(node), torch.nn.Parameter)


def _changes(passes: tuple[Timed, ...], action: str, path: str = "") -> Iterator[Note]:
    changes = [change for timed in passes for change in timed.result.changes]
    return (Note(path + c.node, c.rule, c.reason) for c in changes if c.action == action)


def _skips(part: Part) -> Iterator[Note]:
    for timed in part.passes:
        yield from (Note(part.path + s.node, timed.name, s.reason) for s in timed.result.skips)


def _activation_bytes(parts: list[Part], held: Collection[Node]) -> tuple[dict[str, int], int]:
    """Sum the bytes that nodes write, by dtype, after and before rewriting; views and weights count 0."""
    after: dict[str, int] = {}
    before = 0
    for node in (n for part in parts for n in part.gm.graph.nodes if writes_memory(n)):
        if is_cast(node) and node.args[0] in held:
            continue
        for tensor in written(node):
            name = SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            after[name] = after.get(name, 0) + size_of(tensor)
        before += 0 if is_cast(node) else sum(map(size_of, tensors(captured(node))))
    return dict(sorted(after.items())), before

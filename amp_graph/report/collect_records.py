"""Reads a captured graph's nodes into the records of a report.

Before: ``Captured`` (a GraphModule whose nodes carry marks). After: ``GraphReport``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from amp_graph.capture.dynamo_backend import Captured
from amp_graph.devices import device_of
from amp_graph.passes.base import Change
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.graph_text import SHORT, graph_text, target_text, type_text
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.liveness import size_of, writes_memory, written
from amp_graph.passes.graph.meta_keys import (
    BUDGET,
    CAST,
    LEFT_ALONE,
    PREDICTED,
    SPARED,
    UNPLANNED,
)
from amp_graph.passes.precision.op_cost import PICOSECONDS, forward_flops
from amp_graph.passes.precision.plan_precision import Mark
from amp_graph.passes.weights.frozen_weights import is_frozen
from amp_graph.report.graph_parts import Part, captured_in, cast_dtype, is_cast, mark_of, parts_of, shown_name
from amp_graph.report.records import ACTIVATION, CALLS, WEIGHT, GraphReport, NodeReport, Predicted

WANTED = "it stays low all the same: inputs are low, or the model's code or the policy asks for low precision"
UNMEASURED = "it stays low all the same: the rates are not of this machine; amp-graph calibrate measures them"
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # its lines are none of the user's
PLAN = "plan-precision"  # the pass whose changes are the precisions of the nodes


def read_graph(index: int, record: Captured, weights: Collection[str]) -> GraphReport:
    """Read one captured graph; ``weights`` are the names of the model's parameters and buffers."""
    made = record.rewritten
    parts = list(parts_of(made))
    nodes = [node for part in parts for node in part.gm.graph.nodes]
    dtypes = {t.dtype for node in nodes for t in tensors(captured(node))}
    held = weight_nodes(parts, weights)
    by_dtype, before = _activation_bytes(nodes, held)
    inputs = [t for node in made.gm.graph.find_nodes(op="placeholder") for t in tensors(value(node))]
    return GraphReport(
        index,
        record.training,
        record.grad,
        any(not isinstance(size, int) for t in inputs for size in t.shape),
        device_of(made.gm),
        SHORT[made.dtype],
        made.before,
        tuple(n for part in parts for n in _node_reports(part, parts, held, made.dtype)),
        tuple(n for part in parts for n in captured_in(part, weights)),
        tuple(_changes(parts)),
        tuple(Change(t.name, "skipped", part.path + s.node, s.reason)
              for part in parts for t in part.passes for s in t.result.skips),
        record.break_reason,
        record.break_line,
        by_dtype,
        before,
        torch.float32 in dtypes,
        any(d.is_floating_point or d.is_complex for d in dtypes),
        made.gm.meta.get(BUDGET),
        _predicted(parts, made.policy.leaves),
        sum(node.meta.get(SPARED, 0) for node in nodes),
        tuple(Change(t.name, "left out", part.path, t.failure) for part in parts for t in part.passes if t.failure),
        "; ".join(part.gm.meta[UNPLANNED] for part in parts if UNPLANNED in part.gm.meta),
    )  # fmt: skip


def _predicted(parts: list[Part], leaves: str) -> Predicted | None:
    """Return the predicted speed of all parts that contain low precision, or would."""
    found = [part.gm.meta[PREDICTED] for part in parts if PREDICTED in part.gm.meta]
    if not any(one.is_low for one in found):
        return None
    full = sum(one.full for one in found) or 1
    planned, autocast = sum(one.planned for one in found), sum(one.autocast for one in found)
    left = LEFT_ALONE in parts[0].gm.meta
    why = ""
    if leaves == "graphs" and not left:
        why = UNMEASURED if all(one.may_be_full for one in found) else WANTED
    speed, of_autocast = full / (planned or 1), full / autocast if autocast else 0.0
    return Predicted(speed, found[0].machine, left, full / PICOSECONDS, of_autocast, why)


def _node_reports(part: Part, parts: list[Part], held: Collection[Node], low: torch.dtype) -> Iterator[NodeReport]:
    """Yield the record of each node of ``part``, which is one of ``parts``."""
    texts = graph_text(part.gm).split("\n")
    between = _sources_between(part, parts)
    for number, node in enumerate(part.gm.graph.nodes):
        kind, mark, line = _kind(node, held), mark_of(node), node_info.source_line(node)
        is_call = kind in CALLS
        precision, reason = _precision(part, node, mark, low) if is_call else ("", "")
        given = value(node) if node.op != "output" else None
        own = (written(node) if writes_memory(node) else []) if is_call else tensors(given)
        planned = mark if is_call else None
        yield NodeReport(
            part.path + node.name,
            f"{part.path}%{number}",
            kind,
            target_text(node) if is_call else "output" if kind == "output" else shown_name(node),
            type_text(given),
            node_info.module_path(node) if is_call else "",
            between.get(node.name, tuple(part.path + source.name for source in node.all_input_nodes)),
            texts[number],
            planned.ops if planned and planned.ops else (target_text(node),) if is_call else (),
            str(planned.cls) if planned else "cast" if kind == "cast" else "",
            precision,
            reason,
            planned.origin if planned else "",
            "" if not is_call or line.startswith(PACKAGE) else line,
            type_text(captured(node)) if is_call else "",
            planned is None or planned.listed,
            sum(map(size_of, own)),
            forward_flops(node, planned.cls, planned.ops) if planned else 0,
            planned.key if planned else "",
            *(_cast_of(node, held) if kind == "cast" else ()),
        )


def _cast_of(node: Node, held: Collection[Node]) -> tuple[str, str, str, bool]:
    """Return what a cast casts, whether that is a weight, to which dtype, and whether a frozen model keeps it."""
    source: Any = node.args[0]
    return shown_name(source), WEIGHT if source in held else ACTIVATION, SHORT[cast_dtype(node)], is_frozen(node)


def _kind(node: Node, held: Collection[Node]) -> str:
    if node in held:
        return WEIGHT
    if node.op == "get_attr":
        return "constant" if tensors(value(node)) else "subgraph"
    kind = "cast" if is_cast(node) else "part" if is_part(node) else "operation"
    return {"placeholder": "input", "output": "output"}.get(node.op, kind)


def _precision(part: Part, node: Node, mark: Mark | None, low: torch.dtype) -> tuple[str, str]:
    """Return "low", "full" or "captured": what the node computes in, or a cast converts to; and the reason."""
    if node.name in part.kept:
        return "full", part.kept[node.name]
    if mark is not None:
        return mark.precision, mark.reason
    if is_cast(node):
        return "low" if cast_dtype(node) == low else "full", node.meta[CAST]
    if is_part(node):
        return "captured", "takes one element of a tuple result"
    if any(source.op == "get_attr" and value(source) is None for source in node.all_input_nodes):
        return "captured", "runs a subgraph"
    made = {t.dtype for t in tensors(value(node))} & {low, torch.float32}
    if not made or not part.names or node.name in part.names:
        return "captured", "in a subgraph that stays as captured" if tensors(value(node)) else "computes on no tensor"
    return "low" if low in made else "full", "put in by a pass, in the precision of its operands"


def _sources_between(part: Part, parts: list[Part]) -> dict[str, tuple[str, ...]]:
    """Return what nodes of ``part`` read of other parts: inputs the operands of its call, a body's name its output."""
    found: dict[str, tuple[str, ...]] = {}
    for other in parts:
        for node in other.gm.graph.find_nodes(op="get_attr"):
            if other is part and (body := next((p for p in parts if p.path == f"{part.path}{node.target}/"), None)):
                found[node.name] = (body.path + body.gm.graph.output_node().name,)
            elif part.path == f"{other.path}{node.target}/":
                pairs = zip(_operands(node), part.gm.graph.find_nodes(op="placeholder"), strict=False)
                found |= {taken.name: (other.path + source.name,) for source, taken in pairs}
    return found


def _operands(body: Node) -> list[Node]:
    """Return the operands of the call of ``body``; none if several nodes call it."""
    if len(body.users) != 1:
        return []
    (caller,) = body.users
    leaves = [leaf for leaf in tree_leaves((caller.args, caller.kwargs)) if isinstance(leaf, Node)]
    last = max(i for i, leaf in enumerate(leaves) if leaf.op == "get_attr" and value(leaf) is None)
    return leaves[last + 1 :]


def weight_nodes(parts: list[Part], weights: Collection[str]) -> set[Node]:
    """Return the nodes that hold the model's parameters and buffers, in the graph and in its bodies."""
    held: set[Node] = set()
    for part in parts:
        names = {node.name for node in held}
        leaves = (node for node in part.gm.graph.nodes if node.op in ("placeholder", "get_attr"))
        held |= {
            node for node in leaves
            if isinstance(captured(node), torch.nn.Parameter) or shown_name(node) in weights
            or (node.op == "placeholder" and node.name in names)  # a body's operand
        }  # fmt: skip
    return held


def _changes(parts: list[Part]) -> Iterator[Change]:
    """Yield what the passes did, without the plan; nodes that a checkpoint was rebuilt from are in its part now."""
    moved = {n.name: part.path for part in parts if not part.passes for n in part.gm.graph.nodes}
    for part in parts:
        own = {node.name for node in part.gm.graph.nodes}
        for timed in part.passes:
            for change in timed.result.changes if timed.name != PLAN else ():
                path = part.path if change.node in own else moved.get(change.node, part.path)
                yield replace(change, node=path + change.node)


def _activation_bytes(nodes: list[Node], held: Collection[Node]) -> tuple[dict[str, int], int]:
    """Sum the bytes that nodes write, by dtype, after and before rewriting; views and weights count 0."""
    after: dict[str, int] = {}
    before = 0
    for node in (one for one in nodes if writes_memory(one) and not (is_cast(one) and one.args[0] in held)):
        for tensor in written(node):
            name = SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            after[name] = after.get(name, 0) + size_of(tensor)
        before += 0 if is_cast(node) else sum(map(size_of, tensors(captured(node))))
    return dict(sorted(after.items())), before

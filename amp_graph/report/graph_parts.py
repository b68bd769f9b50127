"""A rewritten graph and the graphs inside of it, and what their nodes are: casts of ours, planned operations, inputs.

Before: a ``Rewritten``. After: a ``Part`` for it and for each of its subgraphs, ``wrap_body_0/``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.casts.share_casts import shared_cast
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.bodies import graph_read
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import CAST, INPUT, MARK
from amp_graph.passes.manager import Timed
from amp_graph.passes.precision.plan_precision import Mark
from amp_graph.passes.weights.batch_weight_casts import low_weight
from amp_graph.passes.weights.frozen_weights import is_frozen
from amp_graph.report.records import CapturedNode
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


def parts_of(rewritten: Rewritten, path: str = "") -> Iterator[Part]:
    """Yield a rewritten graph and all its subgraphs."""
    changes = [change for timed in rewritten.passes for change in timed.result.changes]
    kept = {change.node: change.reason for change in changes if change.action == "kept full"}
    yield Part(path, rewritten.gm, rewritten.before, rewritten.passes, kept, rewritten.names)
    for node in rewritten.gm.graph.nodes:
        body, name = graph_read(rewritten.gm, node), str(node.target)
        if body is not None and name in rewritten.bodies:
            yield from parts_of(rewritten.bodies[name], f"{path}{name}/")
        elif body is not None:  # left as captured, or a checkpoint rebuilt from nodes of this graph
            yield Part(f"{path}{name}/", body, "", (), kept)


def is_cast(node: Node) -> bool:
    """Say whether ``node`` is a cast that the passes inserted."""
    ours = node.target in (low_weight, shared_cast) or is_frozen(node)
    return CAST in node.meta and (node.op == "call_method" or ours)


def cast_dtype(node: Node) -> torch.dtype:
    """Return the dtype that a cast converts to."""
    dtype: Any = node.args[1] if node.target is shared_cast else value(node).dtype
    assert isinstance(dtype, torch.dtype), "a cast is to a dtype"
    return dtype


def mark_of(node: Node) -> Mark | None:
    """Return the plan's mark on ``node``; None on plumbing, which may carry its producer's."""
    return None if is_part(node) else node.meta.get(MARK)


def shown_name(node: Node) -> str:
    """Return a node's displayed name: an input's own name, or the node's name."""
    if node.op == "placeholder":
        return node_info.clean_path(str(node.meta.get(INPUT, node.target))) or node.name
    return str(node.target) if node.op == "get_attr" else node.name


# -- the graph as captured ----------------------------------------------------------------------------


# The graph was rewritten in place: its text, and the names of its nodes, are what is left of it. A line of it:
# ``%8: f32[8,32] = linear(%5, %6, %7)  # fc``.
NODE = re.compile(r"%\d+(?:: (.*?))? = (input |attribute |)(.*)", re.DOTALL)
CALL = re.compile(r"([^(]*)\((.*)\)(?:  # (.*))?", re.DOTALL)
STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
READ = re.compile(r"%(\d+)")
FLOATS = re.compile(r"\b(?:b?f\d+)\[")
# What converts a dtype, by the name that the text of a graph has for it.
CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "convert_element_type"}
)


def captured_nodes(path: str, before: str, names: Sequence[str], weights: Collection[str]) -> Iterator[CapturedNode]:
    """Yield the nodes of the graph at ``path`` as captured, read from its text ``before``.

    names: those of its nodes. weights: the names of the model's parameters and buffers.
    """
    types: list[str] = []
    for number, (name, line) in enumerate(zip(names, _split(before, len(names)), strict=False)):
        kind, call, type, module, arguments = _parsed(line, weights)
        read = [int(i) for i in READ.findall(STRING.sub("", arguments))]
        sources = dict.fromkeys(i for i in read if i < number)
        if kind == "operation" and _converts(call, type, [types[i] for i in sources]):
            kind = "cast"
        types.append(type)
        read_names = tuple(path + names[i] for i in sources)
        yield CapturedNode(path + name, f"{path}%{number}", kind, call, type, module, read_names, line)


def _split(text: str, count: int) -> list[str]:
    """Return the lines of a graph's own nodes; none where a name with a line break makes them ambiguous."""
    own = re.split(r"\n(?=%\d+(?:: | = )|return |\n+subgraph )", text)[:count]
    is_whole = all(line.startswith((f"%{i}:", f"%{i} ", "return ")) for i, line in enumerate(own))
    return own if is_whole and len(own) == count else []


def _parsed(line: str, weights: Collection[str]) -> tuple[str, str, str, str, str]:
    """Return kind, call, type, module and arguments of a line."""
    found = NODE.fullmatch(line)
    if found is None:
        return "output", "output", "", "", line
    type, leaf, rest = found[1] or "", found[2], found[3]
    if leaf:
        kind = "weight" if rest in weights else "input" if leaf == "input " else "constant"
        return kind, rest, type, rest.rpartition(".")[0] if kind == "weight" else "", ""
    call = CALL.fullmatch(rest)
    return ("operation", call[1], type, call[3] or "", call[2]) if call else ("operation", rest, type, "", "")


def _converts(call: str, type: str, operands: list[str]) -> bool:
    """Say whether a call changes the floating-point dtype of its operand."""
    name = call.removeprefix(".").removeprefix("aten.").partition(".")[0]
    before = FLOATS.match(operands[0]) if operands else None
    after = FLOATS.match(type)
    return name in CONVERSIONS and before is not None and after is not None and before[0] != after[0]

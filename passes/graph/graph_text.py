"""A stable text form of a graph: the same graph gives the same text in every run; aligned lines; and groups.

``%3: bf16[2,4] = linear(%1, %2)  # layer1.fc``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.meta_keys import INPUT
from amp_graph.passes.torch_compat.dispatch import OpOverload

Key = TypeVar("Key")
Value = TypeVar("Value")
SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def graph_text(gm: GraphModule, own: Sequence[str] = ()) -> str:
    """Return ``gm`` as text, one line per node, followed by its subgraphs; ``own``: the lines, where they are known."""
    lines = [*(own or _lines(gm))]
    for name, part in gm.named_children():
        if isinstance(part, GraphModule):
            lines += ["", f"subgraph {name}:", *("  " + line for line in graph_text(part).splitlines())]
    return "\n".join(lines)


def _lines(gm: GraphModule) -> list[str]:
    names = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    return [_line(node, names) for node in gm.graph.nodes]


KINDS = {"placeholder": "input", "get_attr": "constant", "output": "output"}
# What converts a dtype, by the name that the text of a graph has for it.
CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "_to_copy", "convert_element_type"}
)


@dataclass(frozen=True)
class CapturedNode:
    """One node of a graph, as plain text, which stays when passes rewrite the graph.

    ``name`` is the node's name and ``number`` its place in the graph's text (``%7``), both after the path of
    their subgraph. ``kind``: "input", "weight" (a parameter or a buffer), "constant", "subgraph", "operation", "cast"
    (as captured: a conversion of the user's own; as rewritten: an inserted one), "part" (of a result) or "output".
    ``call``: an input's name, else what the node calls. ``sources``: the names of the nodes that it reads.
    ``text``: its line of the graph's text.
    """

    name: str
    number: str
    kind: str
    call: str
    type: str
    module: str
    sources: tuple[str, ...]
    text: str

    @property
    def path(self) -> str:
        """The subgraph that the node is in: ``wrap_body_0/``; "" for the graph itself."""
        return self.number.rpartition("%")[0]


def captured_nodes(gm: GraphModule) -> tuple[CapturedNode, ...]:
    """Return the nodes of a graph that was captured; which of its inputs are weights is not known here."""
    found = []
    for i, (node, line) in enumerate(zip(gm.graph.nodes, _lines(gm), strict=True)):
        kind = KINDS.get(node.op) or ("cast" if _converts(node) else "operation")
        call = "output" if kind == "output" else _shown_input(node) if kind == "input" else target_text(node)
        module = "" if node.op in KINDS else node_info.module_path(node)
        type = "" if kind == "output" else type_text(value(node))
        sources = tuple(source.name for source in node.all_input_nodes)
        found.append(CapturedNode(node.name, f"%{i}", kind, call, type, module, sources, line))
    return tuple(found)


def _converts(node: Node) -> bool:
    """Say whether ``node`` changes the floating-point dtype of its operand."""
    name = target_text(node).removeprefix(".").removeprefix("aten.").partition(".")[0]
    given = [t for source in node.all_input_nodes[:1] for t in tensors(value(source))]
    floats = [t.dtype for t in (*given[:1], *tensors(value(node))[:1]) if t.is_floating_point()]
    return name in CONVERSIONS and len(set(floats)) == 2


def _shown_input(node: Node) -> str:
    """Return the name of an input as the user wrote it, if Dynamo recorded it."""
    return node_info.clean_path(str(node.meta.get(INPUT, node.target)))


def type_text(val: Any) -> str:
    """Return a value's type: ``bf16[2,4]``, ``(f32[2], i64[2])``, ``i64`` for a symbolic number."""
    if isinstance(val, torch.Tensor):
        sizes = ",".join(str(size) for size in val.shape)
        return f"{SHORT.get(val.dtype, str(val.dtype).removeprefix('torch.'))}[{sizes}]"
    if isinstance(val, (tuple, list)) and tensors(val):
        return "(" + ", ".join(type_text(v) for v in val) + ")"
    return "" if val is None or tensors(val) else f"{val}"


def target_text(node: Node) -> str:
    """Return what a node calls, without addresses: ``linear``, ``.view``, ``aten.mm.default``."""
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, str):
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", type(node.target).__name__)


def _line(node: Node, names: dict[Node, str]) -> str:
    args = [_show(a, names) for a in node.args] + [f"{k}={_show(v, names)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(args)}"
    kind = type_text(value(node))
    typed = f"{names[node]}: {kind}" if kind else names[node]
    if node.op == "placeholder":
        return f"{typed} = input {_shown_input(node)}"
    if node.op == "get_attr":
        return f"{typed} = attribute {node.target}"
    path = node_info.module_path(node)
    return f"{typed} = {target_text(node)}({', '.join(args)})" + (f"  # {path}" if path else "")


def _show(leaf: Any, names: Mapping[Node, str]) -> str:
    if isinstance(leaf, Node):
        return names[leaf]
    if isinstance(leaf, (list, tuple)):
        inside = ", ".join(_show(v, names) for v in leaf)
        return f"[{inside}]" if isinstance(leaf, list) else f"({inside}{',' if len(leaf) == 1 else ''})"
    if isinstance(leaf, dict):
        return "{" + ", ".join(f"{k!r}: {_show(v, names)}" for k, v in leaf.items()) + "}"
    if isinstance(leaf, slice):
        parts = (leaf.start, leaf.stop, leaf.step) if leaf.step is not None else (leaf.start, leaf.stop)
        return ":".join("" if p is None else _show(p, names) for p in parts)
    if isinstance(leaf, torch.dtype):
        return SHORT.get(leaf, str(leaf))
    return repr(leaf) if not callable(leaf) else getattr(leaf, "__name__", type(leaf).__name__)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the last column is not padded."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in their order."""
    found: dict[Key, list[Value]] = {}
    for key, one in pairs:
        found.setdefault(key, []).append(one)
    return found

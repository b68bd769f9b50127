"""The rewritten graph of a report as vertices and edges: data flow, with casts marked.

Before: ``%8: bf16[8,32] = linear(%5, %6, %7)``. After: a ``Vertex`` "linear" of 8192 FLOPs, and three ``Edge`` to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch.fx import Node
from torch.utils._pytree import tree_leaves

from amp_graph.capture.captured_graphs import Captured
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.graph_text import SHORT, target_text
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.node_bytes import size_of, writes_memory, written
from amp_graph.passes.precision.op_cost import forward_flops
from amp_graph.report.collect_records import (  # fmt: skip
    Part,
    cast_reports,
    is_cast,
    mark_of,
    numbered,
    parts_of,
    shown_name,
    weight_nodes,
)
from amp_graph.report.records import CastReport


@dataclass(frozen=True)
class Vertex:
    """One node of a rewritten graph, also an input or the output.

    ``kind``: "input", "weight" (a parameter or a buffer), "constant", "subgraph", "operation", "cast", "part" (of a
    result) or "output". ``title``: an input's name, else what the node calls. ``dtype`` and ``shape``:
    ``bf16`` and ``8,32``; of several tensors with "; " between. ``bytes``: what the node writes, 0 for a view; an
    input's size. ``flops``: of its matrix products in forward, two to a multiply-add, 0 for any other operation.
    """

    name: str
    number: str
    kind: str
    title: str
    dtype: str
    shape: str
    bytes: int
    flops: int


@dataclass(frozen=True)
class Edge:
    """``target`` reads ``source``; ``cast``: the cast of that value, if ``target`` is or contains one."""

    source: str
    target: str
    cast: CastReport | None = None


@dataclass(frozen=True)
class Flow:
    """The vertices of one captured graph, in its order, and the edges between them."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]


def flow_of(record: Captured, weights: Collection[str]) -> Flow:
    """Return the flow of one captured graph; ``weights`` are the names of the model's parameters and buffers."""
    parts = list(parts_of(record.rewritten))
    held = weight_nodes(parts, weights)
    own = [edge for part in parts for edge in _edges(part, held)]
    return Flow(
        tuple(vertex for part in parts for vertex in _vertices(part, held)),
        (*own, *(edge for part in parts for edge in _edges_of_bodies(part, parts))),
    )


def _vertices(part: Part, held: Collection[Node]) -> Iterator[Vertex]:
    for node, number in numbered(part.gm).items():
        kind = _kind(node, held)
        called = kind in ("operation", "cast", "part")
        made = tensors(value(node)) if node.op != "output" else []
        own = written(node) if called and writes_memory(node) else [] if called else made
        mark = mark_of(node)
        yield Vertex(
            part.path + node.name,
            part.path + number,
            kind,
            target_text(node) if called else "output" if kind == "output" else shown_name(node),
            "; ".join(SHORT.get(t.dtype, str(t.dtype).removeprefix("torch.")) for t in made),
            "; ".join(",".join(map(str, t.shape)) for t in made),
            sum(map(size_of, own)),
            forward_flops(node, mark.cls, mark.ops) if mark is not None and called else 0,
        )


def _kind(node: Node, held: Collection[Node]) -> str:
    if node in held:
        return "weight"
    if node.op == "get_attr":
        return "constant" if tensors(value(node)) else "subgraph"
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    return "cast" if is_cast(node) else "part" if is_part(node) else "operation"


def _edges(part: Part, held: Collection[Node]) -> Iterator[Edge]:
    casts = {(source, node): told for source, node, told in cast_reports(part, held)}
    for node in part.gm.graph.nodes:
        for source in node.all_input_nodes:
            yield Edge(part.path + source.name, part.path + node.name, casts.get((source, node)))


def _edges_of_bodies(part: Part, parts: list[Part]) -> Iterator[Edge]:
    """Yield the edges into and out of the subgraphs of ``part`` that have a single call."""
    bodies = {one.path: one for one in parts}
    for node in part.gm.graph.nodes:
        body = bodies.get(f"{part.path}{node.target}/") if node.op == "get_attr" else None
        if body is None:
            continue
        inputs = [n for n in body.gm.graph.nodes if n.op == "placeholder"]
        for source, taken in zip(_operands(node), inputs, strict=False):
            yield Edge(part.path + source.name, body.path + taken.name)
        yield Edge(body.path + body.gm.graph.output_node().name, part.path + node.name)


def _operands(body: Node) -> list[Node]:
    """Return the operands of the call of ``body``; none if several nodes call it."""
    if len(body.users) != 1:
        return []
    (caller,) = body.users
    leaves = [leaf for leaf in tree_leaves((caller.args, caller.kwargs)) if isinstance(leaf, Node)]
    last = max(i for i, leaf in enumerate(leaves) if leaf.op == "get_attr" and value(leaf) is None)
    return leaves[last + 1 :]

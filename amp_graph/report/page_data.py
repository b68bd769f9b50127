"""A report as the block of JSON that its page reads: each text once, each property of the nodes as a column.

Before: 5,000 nodes with reasons. After: ``{"strings": ["", "linear", ...], "graphs": [{"after": {"op": [1, ...]}}]}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amp_graph.report.captured_flow import CapturedNode
from amp_graph.report.graph_flow import Edge, Flow, Vertex
from amp_graph.report.reasons import split_reason
from amp_graph.report.records import CastReport, GraphReport, NodeReport
from amp_graph.report.report_text import short_place

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

Columns = dict[str, list[int]]
ELSEWHERE = re.compile(
    r"^(?:[A-Za-z]:)?[/\\](?:(?!\.py:).)*?(?=[^/\\]+[/\\][^/\\:]+\.py:)"
)  # all but a folder and a file
BEFORE: Mapping[str, Callable[[CapturedNode], str]] = {
    "name": lambda node: node.name,
    "number": lambda node: node.number,
    "kind": lambda node: node.kind,
    "op": lambda node: node.call,
    "module": lambda node: node.module,
    "type": lambda node: node.type,
}


class Strings:
    """A table of texts, each of which has one number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        """Return the number of ``text``."""
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(told: Report) -> dict[str, Any]:
    """Return what the scripts of the page read."""
    strings = Strings()
    captured = told.captured or ((),) * len(told.graphs)
    graphs = [_graph(*one, strings) for one in zip(told.graphs, told.flows, captured, strict=True)]
    return {"strings": list(strings.numbers), "graphs": graphs}


def _graph(graph: GraphReport, flow: Flow, captured: Sequence[CapturedNode], strings: Strings) -> dict[str, Any]:
    places = {vertex.name: i for i, vertex in enumerate(flow.vertices)}
    return {
        "title": f"Graph {graph.index}: {graph.mode}, {graph.dtype}",
        "after": {
            **_after(graph, flow, strings),
            "edges": [place for edge in flow.edges for place in (places[edge.source], places[edge.target])],
            "casts": [_cast(edge.cast, places[edge.target], strings) for edge in _cast_edges(flow.edges)],
        },
        "before": {
            **{name: [strings(read(node)) for node in captured] for name, read in BEFORE.items()},
            "edges": _edges_before(captured),
        },
    }


def _after(graph: GraphReport, flow: Flow, strings: Strings) -> Columns:
    nodes = {node.name: node for node in graph.nodes}
    rows = [_row(vertex, nodes.get(vertex.name)) for vertex in flow.vertices]
    columns = {name: [strings(row[name]) for row in rows] for name in (rows[0] if rows else ())}
    columns["bytes"] = [vertex.bytes for vertex in flow.vertices]
    columns["flops"] = [vertex.flops for vertex in flow.vertices]
    return columns


def _row(vertex: Vertex, node: NodeReport | None) -> dict[str, str]:
    """Return the texts of one vertex; an input has no reason, and a weight belongs to its module."""
    words, figures = split_reason(node.reason, node.ops) if node else ("", "")
    module = node.module if node else vertex.title.rpartition(".")[0] if vertex.kind == "weight" else ""
    return {
        "name": vertex.name,
        "number": vertex.number,
        "kind": vertex.kind,
        "op": vertex.title,
        "ops": ", ".join(node.ops) if node else "",
        "module": module,
        "type": node.type if node else _type(vertex),
        "was": node.captured_type if node else "",
        "precision": node.precision if node else "",
        "cls": node.cls if node else "",
        "words": words,
        "figures": figures,
        "origin": node.origin if node else "",
        "line": page_place(node.line) if node else "",
        "listed": "" if node is None or node.listed else "unlisted",
    }


def page_place(place: str) -> str:
    """Return a place with a relative path: of a file elsewhere, its name and folder, as a page is passed on."""
    return ELSEWHERE.sub(".../", short_place(place))


def _type(vertex: Vertex) -> str:
    pairs = zip(vertex.dtype.split("; "), vertex.shape.split("; "), strict=True)
    return ", ".join(f"{dtype}[{shape}]" for dtype, shape in pairs) if vertex.dtype else ""


def _cast_edges(edges: Iterable[Edge]) -> Iterable[Edge]:
    return (edge for edge in edges if edge.cast is not None)


def _cast(cast: CastReport | None, target: int, strings: Strings) -> list[int]:
    """Return one cast: its node, what it casts, to which dtype, why; 1 for a weight; 1 for one that is kept."""
    assert cast is not None, "asked of edges with a cast"
    texts = [strings(text) for text in (cast.source, cast.to, cast.reason)]
    return [target, *texts, int(cast.of == "weight"), int(cast.kept)]


def _edges_before(captured: Sequence[CapturedNode]) -> list[int]:
    places = {node.name: i for i, node in enumerate(captured)}
    return [place for i, node in enumerate(captured) for source in node.sources for place in (places[source], i)]

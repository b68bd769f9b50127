"""A report as the block of JSON that its page reads: each text once, each property of the nodes as a column.

Before: 5,000 nodes with reasons. After: ``{"strings": ["", "linear", ...], "graphs": [{"after": {"op": [1, ...]}}]}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from amp_graph.report.graph_facts import short_place
from amp_graph.report.reasons import split_reason
from amp_graph.report.records import WEIGHT, CapturedNode, GraphReport, NodeReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

ELSEWHERE = re.compile(
    r"^(?:[A-Za-z]:)?[/\\](?:(?!\.py:).)*?(?=[^/\\]+[/\\][^/\\:]+\.py:)"
)  # all but a folder and a file
Column = Callable[[Any], str]
SAME: dict[str, Column] = {
    "name": lambda node: node.name,
    "number": lambda node: node.number,
    "kind": lambda node: node.kind,
    "op": lambda node: node.call,
    "type": lambda node: node.type,
}
BEFORE: dict[str, Column] = {**SAME, "module": lambda node: node.module}
AFTER: dict[str, Column] = {
    **SAME,
    "module": lambda node: node.call.rpartition(".")[0] if node.kind == WEIGHT else node.module,
    "ops": lambda node: ", ".join(node.ops),
    "was": lambda node: node.captured_type,
    "precision": lambda node: node.precision,
    "cls": lambda node: node.cls,
    "words": lambda node: split_reason(node.reason, node.ops)[0],
    "figures": lambda node: split_reason(node.reason, node.ops)[1],
    "origin": lambda node: node.origin,
    "line": lambda node: page_place(node.line),
    "listed": lambda node: "" if node.listed else "unlisted",
}


class Strings:
    """A table of texts, each of which has one number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        """Return the number of ``text``."""
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(report: Report) -> dict[str, Any]:
    """Return what the scripts of the page read."""
    strings = Strings()
    graphs = [_graph(graph, strings) for graph in report.graphs]
    return {"strings": list(strings.numbers), "graphs": graphs}


def _graph(graph: GraphReport, strings: Strings) -> dict[str, Any]:
    after = _side(graph.nodes, AFTER, strings)
    after["bytes"], after["flops"] = [node.bytes for node in graph.nodes], [node.flops for node in graph.nodes]
    places = {node.name: i for i, node in enumerate(graph.nodes)}
    # One cast: its node, what it casts, to which dtype, why; 1 for a weight; 1 for one that is kept.
    after["casts"] = [
        [places[cast.name], *map(strings, (cast.source, cast.to, cast.reason)), int(cast.of == WEIGHT), int(cast.kept)]
        for cast in graph.casts
    ]
    title = f"Graph {graph.index}: {graph.mode}, {graph.dtype}"
    return {"title": title, "after": after, "before": _side(graph.captured, BEFORE, strings)}


def _side(
    nodes: Sequence[NodeReport | CapturedNode], columns: dict[str, Column], strings: Strings
) -> dict[str, list[Any]]:
    places = {node.name: i for i, node in enumerate(nodes)}
    edges = [place for i, node in enumerate(nodes) for source in node.sources for place in (places[source], i)]
    return {name: [strings(read(node)) for node in nodes] for name, read in columns.items()} | {"edges": edges}


def page_place(place: str) -> str:
    """Return a place with a relative path: of a file elsewhere, its name and folder, as a page is passed on."""
    return ELSEWHERE.sub(".../", short_place(place))

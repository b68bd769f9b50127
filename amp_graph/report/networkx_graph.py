"""A report as a ``networkx.DiGraph``, for queries of one's own, and as GraphML for other tools.

>>> graph = amp_graph.report(model).to_networkx()
>>> networkx.dag_longest_path(graph.subgraph(n for n, d in graph.nodes.items() if d["precision"] == "full"))
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from amp_graph.report.graph_flow import Flow, Vertex
from amp_graph.report.records import GraphReport, NodeReport

if TYPE_CHECKING:
    import networkx

    from amp_graph.report.model_report import Report

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def digraph(told: Report) -> networkx.DiGraph:
    """Return all graphs of ``told`` as one, with node names as ``amp-graph explain`` takes them: ``0:linear``.

    All attributes are strings, numbers and booleans, as GraphML has no others.
    """
    import networkx

    made = networkx.DiGraph(model=_legal(told.model), policy=_legal(str(told.policy)), dtype=told.dtype)
    for graph, flow in zip(told.graphs, told.flows, strict=True):
        _add(made, graph, flow)
    return made


def graphml(told: Report) -> str:
    """Return all graphs of ``told`` in GraphML, one element per line."""
    import networkx

    lines = networkx.generate_graphml(digraph(told), named_key_ids=True)
    return "\n".join(("<?xml version='1.0' encoding='utf-8'?>", *lines, ""))


def _add(made: networkx.DiGraph, graph: GraphReport, flow: Flow) -> None:
    nodes = {node.name: node for node in graph.nodes}
    at = f"{graph.index}:"
    for vertex in flow.vertices:
        found = _attributes(vertex, nodes.get(vertex.name))
        made.add_node(_legal(at + vertex.name), graph=graph.index, **found)
    for edge in flow.edges:
        cast = edge.cast
        told = {"cast": cast.to, "of": cast.of, "reason": _legal(cast.reason), "kept": cast.kept} if cast else {}
        made.add_edge(_legal(at + edge.source), _legal(at + edge.target), **told)


def _attributes(vertex: Vertex, node: NodeReport | None) -> dict[str, Any]:
    """Return the attributes of a vertex; "" for unknown ones, such as an input's precision."""
    return {
        "number": vertex.number,
        "kind": vertex.kind,
        "operation": _legal(", ".join(node.ops) if node else vertex.title),
        "call": _legal(vertex.title),
        "dtype": vertex.dtype,
        "shape": vertex.shape,
        "precision": node.precision if node else "",
        "class": node.cls if node else "",
        "reason": _legal(node.reason) if node else "",
        "bytes": vertex.bytes,
        "flops": vertex.flops,
        "module": _legal(node.module) if node else "",
        "line": _legal(node.line) if node else "",
    }


def _legal(text: str) -> str:
    """Return ``text`` without the characters that XML cannot hold, such as a form feed in a line of source."""
    return NOT_IN_XML.sub("\ufffd", text)

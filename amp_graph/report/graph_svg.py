"""The rewritten graphs of a report as a picture: the nodes of a module stand in one box, coloured by precision.

Before: a ``Flow``. After: SVG, which Graphviz's program ``dot`` lays out from clusters, one for each module.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amp_graph.errors import AmpGraphError
from amp_graph.report.graph_dot import COLOURS, quoted
from amp_graph.report.graph_flow import Flow, Vertex
from amp_graph.report.records import GraphReport

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report

HIDDEN = ("weight", "constant", "subgraph", "part")
SECONDS = 120  # of dot


@dataclass
class Cluster:
    """A module: its own vertices, and the modules inside it."""

    vertices: list[Vertex] = field(default_factory=list)
    inside: dict[str, Cluster] = field(default_factory=dict)


def svg_text(told: Report) -> str:
    """Return the graphs of ``told`` as SVG."""
    source = "\n".join(cluster_lines(told))
    try:
        done = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, timeout=SECONDS)
    except OSError as error:
        raise _error(
            f"dot cannot be run: {error.strerror}", "apt-get install graphviz, or brew install graphviz"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _error(f"dot takes more than {SECONDS} s", "report.html(path): it draws one module at a time") from error
    if done.returncode:
        raise _error(f"dot failed: {done.stderr.strip()[:200]}", "report.html(path)")
    return done.stdout


def _error(what: str, fix: str) -> AmpGraphError:
    return AmpGraphError(f"svg: {what}\n  legal: an installation of Graphviz\n  fix:   {fix}")


def cluster_lines(told: Report) -> Iterator[str]:
    """Yield the graphs of ``told`` in DOT, with a cluster for each module; weights and their casts are left out."""
    yield f"digraph report {{ label={quoted(f'{told.model}, {told.policy}')}; compound=true;"
    yield "  node [shape=box, style=filled, fontname=monospace]; graph [fontname=monospace, color=gray];"
    for graph, flow in zip(told.graphs, told.flows, strict=True):
        yield from _graph_lines(graph, flow)
    yield "}"


def _graph_lines(graph: GraphReport, flow: Flow) -> Iterator[str]:
    nodes = {node.name: node for node in graph.nodes}
    of_weights = {cast.name for cast in graph.casts if cast.of == "weight"}
    shown = [v for v in flow.vertices if v.kind not in HIDDEN and not (v.kind == "cast" and v.name in of_weights)]
    top = Cluster()
    for vertex in shown:
        node, place = nodes.get(vertex.name), top
        for part in node.module.split(".") if node and node.module else ():
            place = place.inside.setdefault(part, Cluster())
        place.vertices.append(vertex)
    precision = {name: "cast" if node.cls == "cast" else node.precision for name, node in nodes.items()}
    yield from _cluster(top, f"{graph.index}", "  ", precision)
    for source, target in _edges(flow, {vertex.name for vertex in shown}):
        yield f"  {quoted(f'{graph.index}:{source}')} -> {quoted(f'{graph.index}:{target}')};"


def _cluster(cluster: Cluster, path: str, indent: str, precision: dict[str, str]) -> Iterator[str]:
    index = path.partition(".")[0]
    for vertex in cluster.vertices:
        fill = COLOURS.get(precision.get(vertex.name, ""), "white")
        label = quoted(f"{vertex.title}\n{vertex.dtype}[{vertex.shape}]" if vertex.dtype else vertex.title)
        shape = ", shape=ellipse" if vertex.kind == "cast" else ""
        yield f"{indent}{quoted(f'{index}:{vertex.name}')} [label={label}, fillcolor={quoted(fill)}{shape}];"
    for name, inside in cluster.inside.items():
        below = f"{path}.{name}"
        yield f"{indent}subgraph {quoted(f'cluster_{below}')} {{ label={quoted(name)};"
        yield from _cluster(inside, below, indent + "  ", precision)
        yield f"{indent}}}"


def _edges(flow: Flow, shown: set[str]) -> dict[tuple[str, str], None]:
    """Return the edges between shown vertices; what takes a part of a result stands for that result."""
    parts = {vertex.name for vertex in flow.vertices if vertex.kind == "part"}
    of = {edge.target: edge.source for edge in flow.edges if edge.target in parts}
    found: dict[tuple[str, str], None] = {}
    for edge in flow.edges:
        source = edge.source
        while source in of:
            source = of[source]
        if source in shown and edge.target in shown:
            found[source, edge.target] = None
    return found

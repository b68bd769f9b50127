r"""A report as a ``networkx.DiGraph``, for queries of one's own, and from that as GraphML and DOT for other tools.

>>> graph = amp_graph.report(model).to_networkx()
>>> networkx.dag_longest_path(graph.subgraph(n for n, d in graph.nodes.items() if d["precision"] == "full"))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from amp_graph.report.records import CALLS

if TYPE_CHECKING:
    import networkx

    from amp_graph.report.model_report import Report

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")  # in a type: bf16[8,32]
COLOURS = {"low": "#c9ebd3", "full": "#ffd8b0", "captured": "#eeeeee", "cast": "#e3d0ff"}


def digraph(report: Report) -> networkx.DiGraph:
    """Return all graphs of ``report`` as one, with node names as ``amp-graph explain`` takes them: ``0:linear``.

    All attributes are strings, numbers and booleans, as GraphML has no others.
    """
    import networkx

    made = networkx.DiGraph(model=_legal(report.model), policy=_legal(str(report.policy)), dtype=report.dtype)
    for graph in report.graphs:
        for node in graph.nodes:
            tensors = TENSOR.findall(node.type)
            texts = {"operation": ", ".join(node.ops) or node.call, "call": node.call, "reason": node.reason,
                     "module": node.module, "line": node.line, "dtype": "; ".join(dtype for dtype, _ in tensors),
                     "shape": "; ".join(shape for _, shape in tensors)}  # fmt: skip
            made.add_node(
                _legal(f"{graph.index}:{node.name}"), graph=graph.index, number=node.number, kind=node.kind,
                precision=node.precision, bytes=node.bytes, flops=node.flops,
                **{"class": node.cls}, **{key: _legal(text) for key, text in texts.items()},
            )  # fmt: skip
        for node in graph.nodes:
            cast = {"cast": node.to, "of": node.of, "reason": _legal(node.reason), "kept": node.kept}
            for place, source in enumerate(node.sources):
                told = cast if node.kind == "cast" and place == 0 else {}
                made.add_edge(*(_legal(f"{graph.index}:{name}") for name in (source, node.name)), **told)
    return made


def graphml(report: Report) -> str:
    """Return all graphs of ``report`` in GraphML, one element per line."""
    import networkx

    lines = networkx.generate_graphml(digraph(report), named_key_ids=True)
    return "\n".join(("<?xml version='1.0' encoding='utf-8'?>", *lines, ""))


def dot(report: Report) -> str:
    r"""Return the graphs in Graphviz's language, colored by precision: ``amp-graph dump --format dot | dot -Tsvg``.

    A node is ``"0:linear" [label="linear\nbf16[8,4]", fillcolor="#c9ebd3"];``.
    """
    made = digraph(report)
    return "".join(f"{line}\n" for graph in report.graphs for line in _dot_lines(made, graph.index, graph.title))


def _dot_lines(made: networkx.DiGraph, index: int, title: str) -> Iterator[str]:
    inside = {name: node for name, node in made.nodes.items() if node["graph"] == index}
    yield f"digraph graph_{index} {{"
    yield f"  label={json.dumps(title)}; node [shape=box, style=filled, fontname=monospace];"
    for name, node in inside.items():
        kind, sizes = node["kind"], zip(node["dtype"].split("; "), node["shape"].split("; "), strict=True)
        label = "\n".join((node["call"], ", ".join(f"{dtype}[{shape}]" for dtype, shape in sizes if dtype)))
        shape = "" if kind in ("operation", "part") else f", shape={'ellipse' if kind == 'cast' else 'plaintext'}"
        fill = COLOURS["cast" if kind == "cast" else node["precision"]] if kind in CALLS else "white"
        yield f'  {json.dumps(name)} [label={json.dumps(label.strip())}, fillcolor="{fill}"{shape}];'
    for source, target in made.edges(inside):
        yield f"  {json.dumps(source)} -> {json.dumps(target)};"
    yield "}"


def _legal(text: str) -> str:
    """Return ``text`` without the characters that XML cannot hold, such as a form feed in a line of source."""
    return NOT_IN_XML.sub("\ufffd", text)

r"""A graph in Graphviz's DOT language, colored by precision: ``amp-graph dump ... --format dot | dot -Tsvg``.

``"linear" [label="linear\nbf16[8,4]", fillcolor="#c9ebd3"];``
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule

from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import target_text, type_text
from amp_graph.report.collect_records import is_cast, precision_of, shown_name

COLOURS = {"low": "#c9ebd3", "full": "#ffd8b0", "captured": "#eeeeee", "cast": "#e3d0ff"}


def dot_lines(index: int, gm: GraphModule, low: torch.dtype, title: str) -> Iterator[str]:
    """Yield the lines of a graph in DOT, colored by precision."""
    yield f"digraph graph_{index} {{"
    yield f"  label={quoted(title)}; node [shape=box, style=filled, fontname=monospace];"
    for node in gm.graph.nodes:
        called = node.op in ("call_function", "call_method", "call_module")
        name = target_text(node) if called else shown_name(node)
        shape = ", shape=ellipse" if is_cast(node) else "" if called else ", shape=plaintext"
        fill = COLOURS["cast" if is_cast(node) else precision_of(node, low)] if called else "white"
        label = quoted(f"{name}\n{type_text(value(node))}".strip())
        yield f"  {quoted(node.name)} [label={label}, fillcolor={quoted(fill)}{shape}];"
    for node in gm.graph.nodes:
        yield from (f"  {quoted(s.name)} -> {quoted(node.name)};" for s in node.all_input_nodes)
    yield "}"


def quoted(text: str) -> str:
    """Return ``text`` as a string of DOT."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

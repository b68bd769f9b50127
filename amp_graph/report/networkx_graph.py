r"""A report as a ``networkx.DiGraph``, for queries of one's own, and for the files that networkx writes of it.

>>> graph = amp_graph.report(model).to_networkx()
>>> networkx.dag_longest_path(graph.subgraph(n for n, d in graph.nodes.items() if d["precision"] == "full"))
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

    from amp_graph.report.model_report import Report

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")  # in a type: bf16[8,32]


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
                ends = (_legal(f"{graph.index}:{name}") for name in (source, node.name))
                made.add_edge(*ends, **(cast if node.kind == "cast" and place == 0 else {}))
    return made


def _legal(text: str) -> str:
    """Return ``text`` without the characters that XML cannot hold, such as a form feed in a line of source."""
    return NOT_IN_XML.sub("\ufffd", text)

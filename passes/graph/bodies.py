"""The graphs inside of a graph: the bodies of ``cond``, ``scan``, ``while_loop`` and other higher-order operators.

Before: ``cond(pred, true, false, (x,))`` in module ``mixer``. After: ``bodies_of(gm)`` yields the graphs of ``true``
and ``false``, and each knows its place, such as ``mixer.cond/0/``, whatever Dynamo calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from amp_graph.passes.graph.meta_keys import INSIDE
from amp_graph.passes.graph.node_info import is_higher_order, module_path

# The bodies of these operators are rewritten; those of others stay as captured.
REWRITTEN = frozenset(
    {"tag_activation_checkpoint", "cond", "while_loop", "scan", "wrap", "invoke_subgraph", "map_impl"}
)


@dataclass(frozen=True, eq=False)
class Body:
    """A graph, and its ``name`` in the graph around it."""

    name: str
    graph: GraphModule


def graph_read(gm: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph that ``node`` reads, an operand of a higher-order operator; None if it reads none."""
    found = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def bodies_of(gm: GraphModule) -> Iterator[Body]:
    """Yield each graph that an operator of ``REWRITTEN`` runs once, and write its place into its metadata."""
    outer, calls, seen = gm.meta.get(INSIDE, ""), Counter[str](), set[str]()
    for node in gm.graph.nodes:
        if not is_higher_order(node) or getattr(node.target, "__name__", "") not in REWRITTEN:
            continue
        place = ".".join(filter(None, (module_path(node), node.target.__name__)))
        number, position = calls[place], 0
        calls[place] += 1
        for source in node.all_input_nodes:
            graph = graph_read(gm, source)
            if graph is None:
                continue
            if str(source.target) not in seen:
                seen.add(str(source.target))
                graph.meta[INSIDE] = f"{outer}{place}{f'.{number}' if number else ''}/{position}/"
                yield Body(str(source.target), graph)
            position += 1

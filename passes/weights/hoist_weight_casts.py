"""Hoist the casts of weights out of a graph, which then reads low-precision copies that its caller keeps.

Before: ``w16 = w.bfloat16(); linear(x, w16)`` in each forward. After: ``linear(x, w16)`` with ``w16`` an input, which
is written once per update.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT
from amp_graph.passes.precision.plan_precision import marks


@dataclass(frozen=True)
class Hoisted:
    """One cast that became an input: the graph input that it casts, and the dtype."""

    source: int
    dtype: torch.dtype


def hoist_weight_casts(gm: GraphModule, weights: Collection[int]) -> list[Hoisted]:
    """Replace the casts of the inputs numbered in ``weights`` with new inputs, appended in order.

    Law: if the copies equal the rounded weights, no output changes by a bit; a weight's gradient is the sum of its own
    and its copies'. A weight that the graph writes keeps its casts. Exactness: bit-exact.
    """
    memory = observe(gm, marks(gm))
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    numbers = {inputs[i]: i for i in weights if not memory.is_written(inputs[i])}
    found = []
    for node in list(gm.graph.nodes):
        source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
        if isinstance(source, Node) and source in numbers and value(node).dtype.itemsize < 4:
            found.append(Hoisted(numbers[source], value(node).dtype))
            inputs.append(_as_input(gm, node, inputs[-1]))
    return found


def _as_input(gm: GraphModule, cast: Node, last: Node) -> Node:
    with gm.graph.inserting_after(last):
        made = gm.graph.placeholder(f"{cast.args[0]}_{cast.name}")
    made.meta = {k: v for k, v in cast.meta.items() if k not in (CAST, CHECKPOINT)}
    cast.replace_all_uses_with(made)
    gm.graph.erase_node(cast)
    return made

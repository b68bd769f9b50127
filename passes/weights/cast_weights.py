"""Find the casts of weights, and hoist them out of the graph of a step.

Before: ``w = weight.bfloat16(); y = linear_low(x, w)``. After: ``w`` is an input: a copy that the update writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.aliasing import Memory, observe
from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, TRANSFORM
from amp_graph.passes.precision.plan_precision import marks
from amp_graph.passes.torch_compat.storage import storage_key


def casts_of_parameters(gm: GraphModule, dtype: torch.dtype) -> Iterator[tuple[Node, str]]:
    """Yield each inserted cast of a parameter to ``dtype``, and why it must stay a plain cast, or ""."""
    memory = observe(gm, marks(gm))
    returned = {storage_key(t) for s in gm.graph.output_node().all_input_nodes for t in tensors(value(s))}
    for node in list(gm.graph.nodes):
        if casts_weight(node) and value(node).dtype == dtype:
            yield node, _refusal(node, memory, returned)


def casts_weight(node: Node) -> bool:
    """Say whether ``node`` is an inserted cast of a parameter."""
    source = node.args[0] if CAST in node.meta and node.op == "call_method" else None
    return isinstance(source, Node) and source.op == "placeholder" and isinstance(captured(source), torch.nn.Parameter)


def _refusal(node: Node, memory: Memory, returned: set[int | None]) -> str:
    source = node.args[0]
    assert isinstance(source, Node), "asked of casts alone"
    if memory.is_written(source):
        return "the forward writes to it"
    if storage_key(value(node)) in returned:
        return "the forward returns it"
    return "inside a torch.func transform" if TRANSFORM in node.meta else ""


def hoist_weight_casts(gm: GraphModule, weights: Collection[int]) -> list[tuple[int, torch.dtype]]:
    """Replace the casts of the inputs numbered in ``weights`` with new inputs, appended in order; return what they are.

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
            found.append((numbers[source], value(node).dtype))
            inputs.append(_as_input(gm, node, inputs[-1]))
    return found


def _as_input(gm: GraphModule, cast: Node, last: Node) -> Node:
    with gm.graph.inserting_after(last):
        made = gm.graph.placeholder(f"{cast.args[0]}_{cast.name}")
    made.meta = {k: v for k, v in cast.meta.items() if k not in (CAST, CHECKPOINT)}
    cast.replace_all_uses_with(made)
    gm.graph.erase_node(cast)
    return made

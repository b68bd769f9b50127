"""Arguments that a loss may not reach, and who would notice that autograd comes there all the same.

Before: ``loss`` depends on one of two outputs, and autograd leaves out what leads to the other. After: one node stands
for the whole recorded call, so that autograd goes on to all arguments, to some with no gradient: hooks are called with
None, and a Python function upstream makes zeros of it. Where somebody would notice, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from amp_graph.passes.graph.node_info import is_mutable
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.replay.flat_graph import Flat

NOTICED = "a loss may reach an input through some of its outputs only, where {} must not hear of the others"


def partly_reached(flat: Flat) -> tuple[int, ...]:
    """Return the numbers of the arguments that some outputs with gradients reach, and others do not."""
    count = sum(steps is not None for steps in flat.pattern)
    if flat.backward is None or count < 2:
        return ()
    reached = _seeds_reached(flat.backward.graph, count)
    found: dict[int, int] = {}
    for i, grad in zip(flat.routes, _results(flat.backward.graph), strict=True):
        found[i] = found.get(i, 0) | (reached[grad] if isinstance(grad, Node) else 0)
    return tuple(i for i, seeds in found.items() if seeds not in (0, 2**count - 1))


def who_notices(args: Sequence[Any], numbers: Sequence[int]) -> str:
    """Return who would notice that autograd goes on to one of these arguments with no gradient."""
    for a in [args[i] for i in numbers]:
        if a._backward_hooks or getattr(a, "_post_accumulate_grad_hooks", None):
            return NOTICED.format("the hooks of that input")
        if a.grad_fn is not None:
            return NOTICED.format("what computed that input")
    return ""


def _seeds_reached(graph: Graph, count: int) -> dict[Node, int]:
    """Return for each node the outputs' gradients that it depends on, as a bit mask."""
    seeds = graph.find_nodes(op="placeholder")[-count:]
    found = {node: 1 << n for n, node in enumerate(seeds)}
    for node in graph.nodes:
        if node not in found:
            found[node] = 0
            for given in node.all_input_nodes:
                found[node] |= found[given]
            if isinstance(node.target, OpOverload) and is_mutable(node.target):
                found |= dict.fromkeys(node.all_input_nodes, found[node])
    return found


def _results(graph: Graph) -> Sequence[Any]:
    results: Any = graph.output_node().args[0]
    return results if isinstance(results, Sequence) else (results,)

"""Which results of a graph that was captured under autocast are of low precision without autocast, too.

Before: ``return h, h.half()`` behind a ``print``, where ``h`` is fp16 by autocast. After: the second is known to be the
user's own, and stays fp16 in what the call returns, as without amp_graph.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.passes.node_value import adopt_values, tensors, value

METHODS = {"bfloat16": torch.bfloat16, "half": torch.float16}


def low_by_user(gm: GraphModule, dtype: torch.dtype) -> dict[int, frozenset[int]]:
    """Return which outputs are of ``dtype`` without autocast, by position, each with the inputs that have to be so.

    ``x.to(dtype)`` is not among them: Dynamo records ``x.to(y.dtype)`` as the same, and there autocast chose ``y``'s.
    """
    adopt_values(gm)
    found: dict[Node, frozenset[int]] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if _is_low(node, dtype):
            found[node] = frozenset([position])
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method") or not _is_low(node, dtype):
            continue
        operands = [n for n in node.all_input_nodes if any(t.is_floating_point() for t in tensors(value(n)))]
        if node.op == "call_method" and METHODS.get(str(node.target)) is dtype:
            found[node] = frozenset()
        elif operands and all(n in found for n in operands):
            found[node] = frozenset().union(*(found[n] for n in operands))
    leaves = tree_leaves(gm.graph.output_node().args)
    return {i: found[leaf] for i, leaf in enumerate(leaves) if isinstance(leaf, Node) and leaf in found}


def _is_low(node: Node, dtype: torch.dtype) -> bool:
    return any(t.dtype == dtype for t in tensors(value(node)))

"""Find weights that are only transposed or reshaped before low-precision kernels read them: cast first, then view.

Before: ``x @ w.T`` with ``w.T`` in fp32, cast again in every call. After: ``w.T`` of the cached low-precision copy of
``w``, which is refreshed once per optimizer step, as for a linear.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import only_views
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.torch_compat.fake import same

WHY = "a view of a weight that only low-precision kernels read: cast before or after the view, the bits are equal"


def views_of_weights(gm: GraphModule, classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the views of whole parameters that only ``allow`` nodes read.

    Excludes parameters that the graph writes: a copy made before the write would be stale.
    """
    found: set[Node] = set()
    for node in reversed([n for n in gm.graph.nodes if n in classes]):
        if classes[node].cls is not OpClass.NEUTRAL or not node.users or not _shows_a_weight(node):
            continue
        if all(u in found or (u in classes and classes[u].cls is OpClass.ALLOW) for u in node.users):
            found.add(node)
    if not found:
        return frozenset()
    memory = observe(gm, classes)
    return frozenset(node for node in found if not memory.is_written(node))


def _shows_a_weight(node: Node) -> bool:
    """Say whether ``node`` is a view, or a chain of views, of all elements of a parameter."""
    while _is_one_view(node):
        (source,) = node.all_input_nodes
        if not same(captured(source).numel(), captured(node).numel()):
            return False
        if source.op == "placeholder":
            return isinstance(captured(source), torch.nn.Parameter) and is_eligible(captured(source))
        node = source
    return False


def _is_one_view(node: Node) -> bool:
    """Say whether ``node`` is one view of one tensor."""
    one = len(node.all_input_nodes) == 1 and only_views(node)
    return one and all(isinstance(captured(n), torch.Tensor) for n in (node, *node.all_input_nodes))

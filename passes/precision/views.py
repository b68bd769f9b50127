"""Views whose precision what reads them decides: of weights that low-precision kernels read, and for ``as_strided``.

Before: ``x @ w.T`` with ``w.T`` in fp32, cast again in every call. After: ``w.T`` of the cached low-precision copy of
``w``, which is refreshed once per optimizer step, as for a linear.

``as_strided`` reads a view over its whole storage, which a cast of the view alone would not have: before,
``h[:, 2:4].as_strided(size, stride, 5)`` with ``h`` low and the slice cast, a copy that starts at the slice. After:
``h`` is cast and the copy is sliced, so element 5 is that of ``h``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import is_part, only_views
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.torch_compat.fake import same

OF_A_WEIGHT = "a view of a weight that only low-precision kernels read: a cast before or after it has the same bits"


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


BY_STRIDES = frozenset({"aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter"})
READ_BY_STRIDES = "its reader indexes the whole storage, which a cast of this view alone would not have"


def read_by_strides(classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the views, and views of views, whose storage an ``as_strided`` operation reads."""
    found: set[Node] = set()
    waiting = [node for node, known in classes.items() if BY_STRIDES & set(known.names)]
    while waiting:
        views = [n for n in waiting.pop().all_input_nodes if n not in found and (only_views(n) or is_part(n))]
        found.update(views)
        waiting.extend(views)
    return frozenset(found)

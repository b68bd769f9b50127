"""Recognize transposes: operations that permute dimensions, and nodes that swap the last two of another node.

Before: ``w.T``, ``w.t()``, ``w.mT``, ``torch.transpose(w, 0, 1)``, ``w.permute(1, 0)``. After:
``swaps_last_two(node)`` for each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.graph.fake_values import captured
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.torch_compat.fake import same

ATEN: Any = torch.ops.aten
# Names in captured graphs. All of them return views, for any dimensions.
TRANSPOSES = frozenset({
    "aten.transpose", "aten.permute", "aten.t", "aten.mT", "aten.numpy_T", "aten.swapaxes", "aten.swapdims",
    "aten.movedim", "aten.moveaxis",
})  # fmt: skip
# Their forms in flat graphs of ATen operators.
FLAT_TRANSPOSES = (ATEN.t.default, ATEN.permute.default, ATEN.transpose.int)


def transposes(node: Node) -> bool:
    """Say whether ``node`` is one operation that permutes dimensions; its value shows which ones."""
    names = names_of(node)
    return len(names) == 1 and names[0] in TRANSPOSES


def swaps_last_two(node: Node) -> bool:
    """Say whether ``node``, as captured, is a view of its operand with the last two dimensions swapped."""
    if not transposes(node) or len(node.all_input_nodes) != 1:
        return False
    a, b = captured(node.all_input_nodes[0]), captured(node)
    if a.dim() < 2:
        return False
    return same(a.mT.shape, b.shape) and same(a.mT.stride(), b.stride())

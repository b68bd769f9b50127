"""Keep operations in full precision, whatever the lists say, because of their operands or of the results in use.

Before: ``a @ h`` with ``a`` sparse, which the lists class as a matmul. After: it runs as captured, in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.classify import Classification

# Tensor layouts whose kernels accept and return low precision as those of dense tensors do.
DENSE = (torch.strided, torch.jagged)
NORMS = frozenset({
    "aten.native_layer_norm", "aten.native_group_norm", "aten.native_batch_norm", "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_functional", "aten._batch_norm_with_update", "aten._batch_norm_impl_index",
})  # fmt: skip


def left_full(node: Node, found: Classification) -> Classification:
    """Return ``found``, or a classification that keeps ``node`` in full precision, with the reason."""
    layouts = {t.layout for n in (node, *node.all_input_nodes) for t in tensors(captured(n))}
    if not layouts.issubset(DENSE):
        names = ", ".join(sorted(str(layout).removeprefix("torch.") for layout in layouts.difference(DENSE)))
        why = f"a tensor is {names}, and such kernels need full precision"
        return replace(found, cls=OpClass.OPAQUE, why=why, listed=True)
    if found.cls is OpClass.FP32_INSIDE and not NORMS.isdisjoint(found.names) and _statistics_are_read(node):
        return replace(found, cls=OpClass.DENY, why="its statistics are read too, and they stay in full precision")
    return found


def _statistics_are_read(node: Node) -> bool:
    """Say whether the statistics of a norm are read, not just its result.

    The kernels return statistics in the dtype of the parameters; fake tensors claim the dtype of the input.
    """
    return any(user.users and user.args[1] != 0 for user in node.users if is_part(user)) or any(
        not is_part(user) for user in node.users if not isinstance(captured(node), torch.Tensor)
    )

"""What the dtypes that the user's code sees do to a plan: ``y.to(x.dtype)``, a custom ``autograd.Function`` of ``x``.

Before: capture in fp32 shows fp32, and what is made so, or wants it so, raises low values. After: known, and the call
can be captured under ``torch.autocast``, where the code sees what it would see there.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.insert_casts import CAST
from amp_graph.passes.node_value import value
from amp_graph.passes.pieces import is_custom_function, refusal
from amp_graph.passes.plan_precision import MARK
from amp_graph.passes.torch_private import reads_of_dtype

PASSED_ON = (OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.PROMOTE)


def raised_by_read_dtypes(gm: GraphModule, low: torch.dtype) -> bool:
    """Say whether values of dtype ``low`` in a planned ``gm`` are raised by what was captured in fp32.

    That are custom functions, and values that a ``dtype`` argument made, in code that read the dtype of a low value.
    False for what could not be planned after a capture under autocast.
    """
    if refusal(gm, low):
        return False
    if any(_is_raised(s, low) for node in gm.graph.nodes if is_custom_function(node) for s in node.all_input_nodes):
        return True
    if not any(_is(node, low) and reads_of_dtype(node) for node in gm.graph.nodes):
        return False
    asked = [node for node in gm.graph.nodes if _asks_fp32(node)]
    reached = set(asked)
    for node in gm.graph.nodes:
        if not reached.intersection(node.all_input_nodes) or not _is(node, torch.float32):
            continue
        mark = node.meta.get(MARK)
        if mark is None or mark.cls not in PASSED_ON:
            continue
        if any(_is(source, low) or _is_raised(source, low) for source in node.all_input_nodes):
            return True
        reached.add(node)
    return False


def _is(node: Node, dtype: torch.dtype) -> bool:
    found = value(node)
    return isinstance(found, torch.Tensor) and found.dtype == dtype


def _asks_fp32(node: Node) -> bool:
    """Say whether the user's call of ``node`` names fp32."""
    if CAST in node.meta or not _is(node, torch.float32):
        return False
    return any(leaf is torch.float32 for leaf in tree_leaves((node.args, dict(node.kwargs))))


def _is_raised(node: Node, low: torch.dtype) -> bool:
    """Say whether ``node`` is a cast of ours from ``low``."""
    return CAST in node.meta and bool(node.args) and isinstance(node.args[0], Node) and _is(node.args[0], low)

"""Keep the finite values of masks finite when they are rounded to low precision.

Before: ``mask.bfloat16()``, which makes -inf of ``torch.finfo(torch.float32).min``, and NaN or zeros of a row of scores
that sees nothing. After: ``within_range(mask, torch.bfloat16).bfloat16()``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import Identity, tensor_inputs
from amp_graph.passes.graph.meta_keys import IDENTITY, MARK
from amp_graph.passes.precision.plan_precision import marks

# What these return is of the size of what they read through weights or statistics, not of a constant that is added.
BOUNDED = (OpClass.ALLOW, OpClass.FP32_INSIDE)
ADDENDS = {"aten.scaled_dot_product_attention": "attn_mask", "aten.baddbmm": "self", "aten.addmm": "self"}


def within_range(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp the finite elements of ``value`` to the range of ``dtype``; infinities and NaN stay."""
    limit = torch.finfo(dtype).max
    return torch.where(value.isinf(), value, value.clamp(-limit, limit))


def out_of_range(gm: GraphModule, dtype: torch.dtype) -> set[Node]:
    """Return the values of a planned graph that may hold finite numbers outside the range of ``dtype``.

    They come from the caller, or from a constant outside that range, by elementwise operations and views.
    """
    found: set[Node] = set()
    planned = marks(gm)
    for node in gm.graph.nodes:
        val = captured(node)
        if node.op in ("placeholder", "get_attr"):
            given = is_eligible(val) and not val.requires_grad and not isinstance(val, torch.nn.Parameter)
        elif node in planned and planned[node].cls in BOUNDED:
            given = False
        else:
            constants = (a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, float))
            given = not all(node_info.fits(c, dtype) for c in constants) or not found.isdisjoint(node.all_input_nodes)
        if given:
            found.add(node)
    return found


def is_added(source: Node, reader: Node) -> bool:
    """Say whether ``reader`` adds, compares or moves ``source``: False for factors of products."""
    mark, identity = reader.meta.get(MARK), reader.meta.get(IDENTITY)
    if mark is None or mark.cls is not OpClass.ALLOW or not isinstance(identity, Identity):
        return True
    inputs, operation = tensor_inputs(reader), identity.operations[0]
    return any(inputs[i] is source for i in operation.operands(ADDENDS.get(operation.packet, "")))

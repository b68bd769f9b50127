"""Keep the finite values of masks finite when they are rounded to low precision.

Before: ``mask.bfloat16()``, which makes -inf of ``torch.finfo(torch.float32).min``, and NaN or zeros of a row of scores
that sees nothing. After: ``within_range(mask, torch.bfloat16).bfloat16()``.
"""

from __future__ import annotations

import torch
from torch import Tag, Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from amp_graph.lists import OpClass
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import operations_of, tensor_inputs
from amp_graph.passes.graph.meta_keys import MARK
from amp_graph.passes.precision.conditioning import SOFTMAX
from amp_graph.passes.precision.plan_precision import marks

# What these return is of the size of what they read through weights or statistics, not of a constant that is added.
BOUNDED = (OpClass.ALLOW, OpClass.FP32_INSIDE)
ADDENDS = {"aten.scaled_dot_product_attention": "attn_mask", "aten.baddbmm": "self", "aten.addmm": "self"}


def within_range(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp the finite elements of ``value`` to the range of ``dtype``; infinities and NaN stay.

    Gradients pass as they do through a cast: a row of scores that sees nothing has the gradient of its softmax.
    """
    limit = torch.finfo(dtype).max
    bounded = value.detach().clamp(-limit, limit)
    bounded = bounded + (value - value.detach()) if value.requires_grad else bounded
    return torch.where(value.isinf(), value, bounded)


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
        elif node in planned and planned[node].cls in BOUNDED and not _is_allowed_by_a_user(node):
            given = False
        else:
            constants = (a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, float))
            given = not all(node_info.fits(c, dtype) for c in constants) or not found.isdisjoint(node.all_input_nodes)
        if given:
            found.add(node)
    return found


def _is_allowed_by_a_user(node: Node) -> bool:
    """Say whether ``node`` is allowed, and no product: by lists of a user's own, or by ``amp_graph.precision``."""
    first = operations_of(node)[:1]
    other = any(Tag.pointwise in o.op.tags or o.packet in SOFTMAX for o in first)
    return node.meta[MARK].cls is OpClass.ALLOW and other


def is_added(source: Node, reader: Node) -> bool:
    """Say whether ``reader`` adds or compares ``source``, or moves it to what does: False for factors of products."""
    mark, operations = reader.meta.get(MARK), operations_of(reader)
    if mark is not None and mark.cls is OpClass.NEUTRAL and not mark.written:
        return any(is_added(reader, user) for user in reader.users)
    if mark is None or mark.cls is not OpClass.ALLOW or not operations:
        return True
    inputs, operation = tensor_inputs(reader), operations[0]
    return _is_allowed_by_a_user(reader) or any(
        inputs[i] is source for i in operation.operands(ADDENDS.get(operation.packet, ""))
    )

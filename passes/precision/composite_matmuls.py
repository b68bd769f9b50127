"""Composites that are a matrix product or none, depending on how they are called.

Before: ``inner(v, w)`` of two vectors, which the lists call a product. After: ``aten.dot``, which is what it calls, and
what ``torch.autocast`` sees of it. ``inner(a, b)`` of matrices stays a product.
"""

from __future__ import annotations

from functools import lru_cache

from torch.fx import Node

from amp_graph.lists import OpClass, OpList, load
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.identify_ops import Identity, Operation, identify_for
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode


def without_false_products(
    node: Node, lists: OpList, mode: FakeTensorMode, found: Identity, apart: frozenset[OpOverload]
) -> tuple[Identity, frozenset[OpOverload]]:
    """Take a composite that the defaults name as a product apart where, as it is called, it holds none.

    ``inner`` of two vectors is a ``dot``, and ``einsum("i,i->i")`` a ``mul``: ``torch.autocast`` sees the parts only.
    """
    left = [o for o in found.operations if _is_product_by_its_parts(o, lists)]
    if not left or len(left) < sum(_is_allowed(o, lists) for o in found.operations):
        return found, apart
    more, parts = apart, found
    while left:
        more |= {o.op for o in left}
        again = identify_for(node, lists, mode, more)
        if isinstance(again, str):
            return found, apart
        parts = again
        left = [o for o in parts.operations if o.op not in more and _comes_apart(o, lists)]
    return (found, apart) if any(_is_allowed(o, lists) for o in parts.operations) else (parts, more)


def _comes_apart(operation: Operation, lists: OpList) -> bool:
    """Say whether what ``operation`` is made of decides its class: it is in no list, or a product by its parts."""
    if not operation.floating or not node_info.is_composite(operation.op) or node_info.is_view(operation.op):
        return False
    return lists.lookup(operation.op, operation.arguments) is None or _is_product_by_its_parts(operation, lists)


def _is_allowed(operation: Operation, lists: OpList) -> bool:
    rule = lists.lookup(operation.op, operation.arguments)
    return operation.floating and rule is not None and rule.cls is OpClass.ALLOW


def _is_product_by_its_parts(operation: Operation, lists: OpList) -> bool:
    """Say whether the defaults alone call ``operation`` a product, and ``torch.autocast`` only what it is made of."""
    if not _is_allowed(operation, lists) or not node_info.is_composite(operation.op):
        return False
    if lists.unlisted != "opaque" or node_info.autocast_has_rule(operation.op, lists.device):
        return False
    default = defaults(lists.dtype, lists.device).lookup(operation.op, operation.arguments)
    return default == lists.lookup(operation.op, operation.arguments)


@lru_cache(maxsize=8)
def defaults(dtype: str, device: str) -> OpList:
    """Return our own list for ``dtype`` on ``device``."""
    return load("default", dtype=dtype, device=device)

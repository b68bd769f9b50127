"""Composites that are a matmul for some arguments only.

Before: ``inner(v, w)`` of two vectors, which the lists class as a matmul. After: ``aten.dot``, which it calls, and
which ``torch.autocast`` sees. ``inner(a, b)`` of matrices stays a matmul.
"""

from __future__ import annotations

from functools import lru_cache

from torch.fx import Node

from amp_graph.lists import OpClass, OpList, load
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.identify_ops import Operation, Operations, taken_apart
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import FakeTensorMode


def without_false_products(
    node: Node, lists: OpList, mode: FakeTensorMode, found: Operations, apart: frozenset[OpOverload]
) -> tuple[Operations, frozenset[OpOverload]]:
    """Decompose a composite that the default list classes as a matmul if this call contains no matmul.

    ``inner`` of two vectors is a ``dot``, and ``einsum("i,i->i")`` a ``mul``: ``torch.autocast`` sees only those.
    """
    left = [o for o in found if _is_product_by_its_parts(o, lists)]
    if not left or len(left) < sum(_is_allowed(o, lists) for o in found):
        return found, apart
    parts, more = taken_apart(node, mode, lambda o: _is_decomposed(o, lists), apart)
    if isinstance(parts, str) or any(_is_allowed(o, lists) for o in parts):
        return found, apart
    return parts, more


def _is_decomposed(operation: Operation, lists: OpList) -> bool:
    """Say whether the operations inside ``operation`` decide its class: no list names it, or only the default list."""
    if not operation.floating or not node_info.is_composite(operation.op) or node_info.is_view(operation.op):
        return False
    return lists.lookup(operation.op, operation.arguments) is None or _is_product_by_its_parts(operation, lists)


def _is_allowed(operation: Operation, lists: OpList) -> bool:
    rule = lists.lookup(operation.op, operation.arguments)
    return operation.floating and rule is not None and rule.cls is OpClass.ALLOW


def _is_product_by_its_parts(operation: Operation, lists: OpList) -> bool:
    """Say whether only the default list names ``operation`` as a matmul; ``torch.autocast`` sees its decomposition."""
    if not _is_allowed(operation, lists) or not node_info.is_composite(operation.op):
        return False
    if lists.unlisted != "opaque" or node_info.autocast_has_rule(operation.op, lists.device):
        return False
    default = defaults(lists.dtype, lists.device).lookup(operation.op, operation.arguments)
    return default == lists.lookup(operation.op, operation.arguments)


@lru_cache(maxsize=8)
def defaults(dtype: str, device: str) -> OpList:
    """Return the default list for ``dtype`` on ``device``."""
    return load("default", dtype=dtype, device=device)

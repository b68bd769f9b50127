"""Protect values that come from integer positions and feed sin, cos or exp: low precision merges positions.

Before: ``(inv_freq @ position_ids.float()).cos()`` with the matmul in bf16, where 256 and 257 are the same number.
After: the matmul stays full precision. (diffusers#13920, transformers#29285, gpt-neox#1003)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, is_eligible, tensors
from amp_graph.passes.precision.classify import Classification

SENSITIVE = frozenset({"aten.sin", "aten.cos", "aten.exp", "aten.exp2", "aten.polar", "aten.sincos", "aten.tan"})
COUNTERS = frozenset({"aten.arange", "aten.linspace", "aten.logspace", "aten.range"})
WHY = "comes from integer positions and feeds sin/cos/exp: in low precision, different positions become equal"


def protected(order: Iterable[Node], classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the ``allow`` nodes that must stay in full precision because they carry positions to sin/cos/exp."""
    return frozenset(n for n in carriers(order, classes) if classes[n].cls is OpClass.ALLOW)


def carriers(order: Iterable[Node], classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the nodes that carry positions to sin/cos/exp."""
    nodes = [node for node in order if node in classes]
    carries: set[Node] = set()
    for node in nodes:
        found = classes[node]
        if _is_counter(node, found) or (
            any(source in carries for source in node.all_input_nodes)
            and found.cls in (OpClass.FOLLOW, OpClass.NEUTRAL, OpClass.ALLOW, OpClass.PROMOTE)
            and not SENSITIVE & set(found.names)
        ):
            carries.add(node)
    feeds: set[Node] = set()
    for node in reversed(nodes):
        for user in node.users:
            if user in classes and (SENSITIVE & set(classes[user].names) or (user in feeds and user in carries)):
                feeds.add(node)
    return frozenset(carries & feeds)


def exact(order: Iterable[Node], classes: Mapping[Node, Classification]) -> frozenset[Node]:
    """Return the nodes that an error budget must not round: carriers of positions, and inputs of a steep function.

    A rounding of a large argument of sin or exp can change the result by more than its own size. The first-order
    prediction for the loss may still call it small.
    """
    nodes = [node for node in order if node in classes]
    found = set(carriers(nodes, classes))
    for node in reversed(nodes):
        harmless = classes[node].cls in (OpClass.FOLLOW, OpClass.NEUTRAL)
        if SENSITIVE & set(classes[node].names) or (harmless and any(user in found for user in node.users)):
            found.add(node)
    return frozenset(found)


def _is_counter(node: Node, found: Classification) -> bool:
    """Say whether ``node`` makes floats from integers, without a table lookup."""
    if not is_eligible(captured(node)):
        return False
    if COUNTERS & set(found.names):
        return True
    carried = [t for source in node.all_input_nodes for t in tensors(captured(source))]
    integers = bool(carried) and all(not t.is_floating_point() and not t.is_complex() for t in carried)
    return integers and (found.conversion or found.cls in (OpClass.FOLLOW, OpClass.NEUTRAL))

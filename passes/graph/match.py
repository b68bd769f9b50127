"""Helpers to match formulas that are written out in Python.

Before: eight nodes of arithmetic on ``x``. After: ``Formula(x, last, inside)``, for ``edit.put_call``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.identify_ops import names_of, operations_of, tensor_inputs
from amp_graph.passes.graph.meta_keys import CHECKPOINT, GRAD, REGION
from amp_graph.passes.graph.node_info import calls_torch, is_mutable
from amp_graph.passes.torch_compat.storage import storage_key

CONVERSIONS = (("aten.to",), ("aten.type_as",))
SUMS = {"aten.add": 2, "aten.add_": 1}  # which of the operands may be added to: in place what is written to
PLACE = (GRAD, REGION, CHECKPOINT)  # meta keys: where a node is computed, and how


@dataclass
class Formula:
    """A matched formula: its argument, its last node, and all of its nodes."""

    x: Node
    last: Node
    inside: set[Node] = field(default_factory=set)


def operation(node: Node) -> tuple[str, list[Any]]:
    """Return a node's one operation and its operands (nodes and numbers); ("", []) for other nodes."""
    operations, args = operations_of(node), [*node.args, *node.kwargs.values()]
    is_one = len(operations) == 1 and calls_torch(node) and {"input", "other", "exponent"}.issuperset(node.kwargs)
    is_plain = is_one and all(isinstance(a, (Node, int, float)) for a in args)
    return (operations[0].packet, args) if is_plain else ("", [])


def one_reader(node: Node) -> Node | None:
    """Return the reader of ``node``; None if it has none, or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def only_reader(node: Node, *names: str) -> Node | None:
    """Return the only reader of ``node`` if it is one of the operations ``names``."""
    user = one_reader(node)
    return user if user is not None and operation(user)[0] in names else None


def summand(total: Node, node: Node) -> Node | None:
    """Return the value that ``total`` adds to ``node``; None if it is no sum of both, or is written to that value."""
    name, operands = operation(total)
    if name not in SUMS or len(operands) != 2 or node not in operands[: SUMS[name]]:
        return None
    other = operands[1 - operands.index(node)]
    return other if isinstance(other, Node) and other is not node else None


def constant_beside(node: Node, operand: Node) -> float | None:
    """Return the number that ``node`` adds to ``operand``, or multiplies it by; None if it is not a number."""
    name, args = operation(node)
    if len(args) != 2 or operand not in args:
        return None
    other = args[1] if args[0] is operand else args[0]
    if isinstance(other, Node):
        return None
    if name in ("aten.div", "aten.div_"):
        return 1 / other if args[0] is operand and other else None
    return float(other)


def converts_nothing(node: Node) -> bool:
    """Say whether ``node`` is a conversion to the dtype that its operand has, which returns that operand."""
    if names_of(node) not in CONVERSIONS or not node.args or not isinstance(node.args[0], Node):
        return False
    given, made = value(node.args[0]), value(node)
    return bool(storage_key(given) == storage_key(made) and given.dtype == made.dtype)


def is_closed(found: Formula) -> bool:
    """Say whether no other node reads an inner value, and all nodes have one dtype and one region.

    Nothing may write to ``x`` inside the formula either.
    """
    like = captured(found.x)
    places = {tuple(repr(n.meta.get(key)) for key in PLACE) for n in found.inside}
    closed = len(places) == 1 and all(
        (node is found.last or set(node.users) <= found.inside) and captured(node).dtype == like.dtype
        for node in found.inside
    )
    return closed and not is_written_meanwhile(found, found.x)


def is_written_meanwhile(found: Formula, operand: Node, apart_from: Collection[Node] = ()) -> bool:
    """Say whether a node between the first and the last of ``found`` writes to the storage of ``operand``.

    A node that reads ``operand`` and writes to any tensor counts, except the nodes in ``apart_from``.
    """
    node, key = min(found.inside), storage_key(captured(operand))
    while node is not found.last:
        writes = any(is_mutable(o.op) for o in operations_of(node))
        touched = [t for n in tensor_inputs(node) if (t := captured(n)) is not None] if writes else []
        if node not in apart_from and any(storage_key(t) == key for t in touched):
            return True
        node = node.next
    return False

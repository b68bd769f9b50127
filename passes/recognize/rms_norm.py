"""Recognize an RMS norm that is written out in Python, and call torch's RMS norm instead.

Before: ``weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))``, as in Llama and similar models. After:
``rms_norm(x, (width,), weight, eps)``: one operation to plan, for which other passes have a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.edit import put_call
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.match import (
    Formula,
    constant_beside,
    converts_nothing,
    is_closed,
    one_reader,
    only_reader,
    operation,
)
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.torch_compat.fake import FakeTensorMode, is_number, same


@dataclass(frozen=True)
class FuseRmsNorm(NodePass):
    """Replaces an RMS norm's formula over the last dimension by ``torch.nn.functional.rms_norm``.

    Law: ``x`` over the root of its mean square plus a number, times one weight per column or none, with no other reader
    inside the formula. Conversions that change no dtype are ignored. Exactness: bit-exact where the norm stays fp32,
    as the kernel computes the same; else it is computed in fp32 inside and rounded once.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Fuse what is around a mean."""
        found = _found(node) if names_of(node) == ("aten.mean",) else None
        if found is None:
            return None
        formula, weight, eps = found
        width = value(formula.x).shape[-1]
        fused = put_call(gm, formula, F.rms_norm, (formula.x, (width,), weight, eps), mode)
        what = f"{len(formula.inside)} operations are one RMS norm of {width}, eps={eps:g}"
        return Change(self.name, "fused", fused.name, what)


def _found(mean: Node) -> tuple[Formula, Node | None, float] | None:
    """Return the RMS norm around ``mean``, its weight and its eps; None if there is none."""
    x = _squared(mean.all_input_nodes[0])
    plus = only_reader(mean, "aten.add")
    eps = constant_beside(plus, mean) if plus is not None else None
    if x is None or plus is None or eps is None or not _is_over_the_last(mean, x):
        return None
    normed = _normed(plus, x)
    if normed is None:
        return None
    inside = {mean.all_input_nodes[0], mean, plus, *normed}
    for last, weight, more in (*_weighted(normed[-1], value(x)), (normed[-1], None, ())):
        formula = Formula(x, last, {*inside, *more})
        if is_closed(formula):
            return formula, weight, eps
    return None


def _squared(node: Node) -> Node | None:
    """Return the node whose square is ``node``; None if it is no square."""
    name, args = operation(node)
    is_square = (
        name == "aten.square" or (name == "aten.pow" and args[1] == 2) or (name == "aten.mul" and len({*args}) == 1)
    )
    return _origin(args[0]) if is_square and isinstance(args[0], Node) else None


def _origin(node: Any) -> Any:
    """Return the source of ``node`` before conversions that change no dtype."""
    while isinstance(node, Node) and converts_nothing(node):
        node = node.args[0]
    return node


def _is_over_the_last(mean: Node, x: Node) -> bool:
    """Say whether ``mean`` is over the last dimension of ``x``, of a known size, and keeps it."""
    shape = value(x).shape
    known = len(shape) > 0 and is_number(shape[-1]) and shape[-1] > 1
    return known and same(value(mean).shape, (*shape[:-1], 1))


def _normed(plus: Node, x: Node) -> tuple[Node, Node] | None:
    """Return the nodes that take the root of ``plus`` and divide ``x`` by it."""
    root = only_reader(plus, "aten.rsqrt", "aten.sqrt", "aten.pow")
    if root is None or (operation(root)[0] == "aten.pow" and operation(root)[1] != [plus, -0.5]):
        return None
    divides = operation(root)[0] == "aten.sqrt"
    normed = only_reader(root, "aten.div" if divides else "aten.mul")
    operands = [_origin(a) for a in operation(normed)[1]] if normed is not None else []
    if normed is None or operands not in ([[x, root]] if divides else [[x, root], [root, x]]):
        return None
    return root, normed


def _weighted(normed: Node, like: torch.Tensor) -> Iterator[tuple[Node, Node, tuple[Node, ...]]]:
    """Yield the product of a norm and a weight per column, the weight, and the nodes up to the product."""
    last, between = normed, []
    while (reader := one_reader(last)) is not None and converts_nothing(reader):
        last = reader
        between.append(last)
    product = only_reader(last, "aten.mul")
    others = [a for a in operation(product)[1] if a is not last] if product is not None else []
    if product is None or len(others) != 1 or not isinstance(others[0], Node):
        return
    weight = captured(others[0])
    if same(weight.shape, like.shape[-1:]) and weight.dtype == like.dtype:
        yield product, others[0], (*between, product)

"""Recognize a GELU that is written out in Python, and call torch's GELU instead.

Before: ``0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))``: eight operations, five of which save their operands
for backward. After: ``gelu(x, approximate="tanh")``: one operation, which computes in fp32 inside and saves only ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.edit import put_call
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.graph.match import Formula, constant_beside, is_closed, only_reader, operation

# The inner function, and the odd polynomial that is its argument: {power: coefficient}.
TANH = math.sqrt(2 / math.pi)
FORMS = {
    "aten.tanh": ("tanh", {1: TANH, 3: TANH * 0.044715}),
    "aten.erf": ("none", {1: math.sqrt(0.5)}),
    "aten.special_erf": ("none", {1: math.sqrt(0.5)}),
}
SCALES = ("aten.mul", "aten.div")
Polynomial = dict[int, float]


@dataclass(frozen=True)
class FuseGelu(Pass):
    """Replaces GELU's formula, in whatever order it is written, by ``torch.nn.functional.gelu``.

    Law: the same function of ``x`` (coefficients agree to six digits), and no other reader inside the formula.
    Exactness: rounding-different; it rounds once, where the formula rounds after each operation.
    """

    name: ClassVar[str] = "fuse-gelu"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every ``tanh`` and ``erf``."""
        mode = fake_mode_of(gm)
        changes = []
        inner = [(node, *FORMS[name]) for node in gm.graph.nodes if (name := operation(node)[0]) in FORMS]
        for node, approximate, polynomial in inner:
            found = _formula(node, polynomial)
            if found is None or mode is None:
                continue
            fused = put_call(gm, found, F.gelu, (found.x,), mode, approximate=approximate)
            what = f"{len(found.inside)} operations are one gelu, approximate={approximate!r}"
            changes.append(Change(self.name, "fused", fused.name, what))
        return PassResult(gm, tuple(changes))


def _formula(inner: Node, wanted: Polynomial) -> Formula | None:
    """Return the GELU around ``inner`` (its tanh or erf), or None if there is none."""
    plus_one = only_reader(inner, "aten.add")
    if plus_one is None or constant_beside(plus_one, inner) != 1:
        return None
    factor, product, coefficient = plus_one, only_reader(plus_one, *SCALES), 1.0
    while product is not None and (constant := constant_beside(product, factor)) is not None:
        coefficient, factor = coefficient * constant, product
        product = only_reader(product, *SCALES)
    others = [n for n in operation(product)[1] if n is not factor] if product is not None else []
    if product is None or len(others) != 1 or operation(product)[0] != "aten.mul":
        return None
    for last, after, outside in _tails(product):
        for x, before, between in _scaled(others[0]):
            if not math.isclose(coefficient * before * after, 0.5, rel_tol=1e-6):
                continue
            found = Formula(x, last, {inner, *_between(plus_one, product), product, *between, *outside})
            argument = operation(inner)[1][0]
            polynomial = _polynomial(argument, found) if isinstance(argument, Node) else None
            if polynomial is not None and _same(polynomial, wanted) and is_closed(found):
                return found
    return None


def _tails(product: Node) -> Iterator[tuple[Node, float, set[Node]]]:
    """Yield the possible ends of the formula: the product, or a multiplication of it by a number."""
    yield product, 1.0, set()
    behind = only_reader(product, *SCALES)
    constant = constant_beside(behind, product) if behind is not None else None
    if behind is not None and constant is not None:
        yield behind, constant, {behind}


def _scaled(node: Node) -> Iterator[tuple[Node, float, set[Node]]]:
    """Yield the possible readings of ``node``: as itself, and as a number times another node."""
    yield node, 1.0, set()
    name, args = operation(node)
    if name in SCALES:
        inner = next((a for a in args if isinstance(a, Node)), None)
        constant = constant_beside(node, inner) if inner is not None else None
        if inner is not None and constant is not None:
            yield inner, constant, {node}


def _between(first: Node, last: Node) -> set[Node]:
    found: set[Node] = set()
    node = first
    while node is not last:
        found.add(node)
        (node,) = node.users
    return found


def _polynomial(node: Node, found: Formula) -> Polynomial | None:
    """Return ``node`` as a polynomial in ``found.x``, and record its nodes; None if it is none."""
    if node is found.x:
        return {1: 1.0}
    name, args = operation(node)
    if name not in ("aten.mul", "aten.div", "aten.add", "aten.pow") or len(args) != 2:
        return None
    found.inside.add(node)
    parts = [_polynomial(a, found) if isinstance(a, Node) else {0: a} for a in args]
    left, right = parts
    if left is None or right is None:
        return None
    if name == "aten.add":
        return {p: left.get(p, 0) + right.get(p, 0) for p in left.keys() | right.keys()}
    if name == "aten.mul":
        return _product(left, right)
    if set(right) != {0}:  # only a number may divide, or be an exponent
        return None
    number = right[0]
    if name == "aten.div":
        return {p: c / number for p, c in left.items()}
    return _product(_product(left, left), left) if number == 3 else _product(left, left) if number == 2 else None


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    made: Polynomial = {}
    for p, c in left.items():
        for q, d in right.items():
            made[p + q] = made.get(p + q, 0) + c * d
    return made


def _same(polynomial: Polynomial, wanted: Polynomial) -> bool:
    return all(
        math.isclose(polynomial.get(p, 0), wanted.get(p, 0), rel_tol=1e-6) for p in polynomial.keys() | wanted.keys()
    )

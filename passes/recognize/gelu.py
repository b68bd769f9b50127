"""Recognize a GELU that is written out in Python, and call torch's GELU instead.

Before: ``0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))``: eight operations, five of which save their operands
for backward. After: ``gelu(x, approximate="tanh")``: one operation, which computes in fp32 inside and saves only ``x``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.edit import put_call
from amp_graph.passes.graph.match import Formula, is_closed, only_reader, operation
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.torch_compat.fake import FakeTensorMode

ROOT = math.sqrt(2 / math.pi)
# The inner function, the form of torch's GELU that has it, and that GELU of a number.
TANH = ("tanh", lambda x: 0.5 * x * (1 + math.tanh(ROOT * (x + 0.044715 * x**3))))
ERF = ("none", lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(0.5))))
INNER: dict[str, tuple[str, Callable[[float], float]]] = {
    "aten.tanh": TANH,
    "aten.erf": ERF,
    "aten.special_erf": ERF,
}
ARITHMETIC: dict[str, Callable[..., float]] = {
    "aten.add": operator.add,
    "aten.mul": operator.mul,
    "aten.div": lambda a, b: a / b if b else math.nan,
    "aten.pow": lambda x, power: x**power if power in (2, 3) else math.nan,
    "aten.tanh": math.tanh,
    "aten.erf": math.erf,
    "aten.special_erf": math.erf,
}
BEHIND = ("aten.add", "aten.mul", "aten.div")  # what follows the inner function, in at most so many steps:
STEPS = 5
AT = (-3.1, -2.3, -1.17, -0.41, 0.29, 0.83, 1.9, 3.3)  # where the two functions are compared


@dataclass(frozen=True)
class FuseGelu(NodePass):
    """Replaces GELU's formula, in whatever order it is written, by ``torch.nn.functional.gelu``.

    Law: the same function of ``x`` (its values agree to five digits), and no other reader inside the formula.
    Exactness: rounding-different; it rounds once, where the formula rounds after each operation.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Fuse what is around a ``tanh`` or an ``erf``."""
        if operation(node)[0] not in INNER:
            return None
        approximate, gelu = INNER[operation(node)[0]]
        found = _formula(node, gelu)
        if found is None:
            return None
        fused = put_call(gm, found, F.gelu, (found.x,), mode, approximate=approximate)
        what = f"{len(found.inside)} operations are one gelu, approximate={approximate!r}"
        return Change(self.name, "fused", fused.name, what)


def _formula(inner: Node, gelu: Callable[[float], float]) -> Formula | None:
    """Return the GELU around ``inner`` (its tanh or erf), or None if there is none."""
    last: Node | None = inner
    for _ in range(STEPS):
        last = None if last is None else only_reader(last, *BEHIND)
        for found in () if last is None else _readings(last):
            if all(math.isclose(_at(found, x), gelu(x), rel_tol=1e-5) for x in AT) and is_closed(found):
                return found
    return None


def _readings(last: Node) -> Iterator[Formula]:
    """Yield ``last`` as arithmetic on one node, on that nearest to it first."""
    pending, inside = {last}, set[Node]()
    while pending:
        node = max(pending)
        pending.remove(node)
        name, args = operation(node)
        if name not in ARITHMETIC:
            return
        inside.add(node)
        pending |= {a for a in args if isinstance(a, Node)}
        if len(pending) == 1:
            (x,) = pending
            yield Formula(x, last, set(inside))


def _at(found: Formula, x: float) -> float:
    """Return what a formula gives for the number ``x``."""
    made = {found.x: x}
    for node in sorted(found.inside):
        name, args = operation(node)
        made[node] = ARITHMETIC[name](*(made[a] if isinstance(a, Node) else a for a in args))
    return made[found.last]

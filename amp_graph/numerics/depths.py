"""How many elements an operation adds up for one element of its result.

Before: ``linear`` of a [8, 512] input. After: 512. Elementwise operations have a depth of 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch.fx import Node

from amp_graph.passes.graph.identify_ops import names_of

PRODUCTS = ("linear", "mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "dot", "einsum", "scaled_dot_product_attention")
REDUCTIONS = ("sum", "mean", "var", "std", "norm", "cumsum", "softmax", "logsumexp", "loss", "prod", "cross_entropy")


def depth_of(node: Node, shapes: Mapping[Node, Sequence[int]]) -> int:
    """Return the depth of ``node``; ``shapes``: of the values so far, its own included."""
    names = names_of(node)
    operands = [shapes[n] for n in node.all_input_nodes if n in shapes]
    if not operands:
        return 1
    bare = {name.removeprefix("aten.").lstrip("_").rstrip("_") for name in names}
    if any("conv" in name for name in bare) and len(operands) > 1:
        return math.prod(operands[1][1:])
    if not bare.isdisjoint(PRODUCTS):
        return max(1, operands[0][-1]) if operands[0] else 1
    if any(name in part for part in bare for name in REDUCTIONS):
        mine, given = math.prod(shapes.get(node, ())), math.prod(operands[0])
        return given // mine if 0 < mine < given else max([1, *operands[0][-1:]])
    return 1

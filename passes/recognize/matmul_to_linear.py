"""Recognize linears that were written as products with a turned parameter.

Before: ``x @ weight.T``, as tied output layers and Falcon have it, which no pass over linears sees. After:
``linear(x, weight)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.lists import OpList
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.edit import put_call
from amp_graph.passes.graph.fake_values import captured, fake_mode_of
from amp_graph.passes.graph.match import Formula, operation
from amp_graph.passes.op_args.transposes import is_transpose_of

ALIKE = (torch.ops.aten.matmul.default, torch.ops.aten.mm.default, torch.ops.aten.linear.default)
PRODUCTS = ("aten.matmul", "aten.mm")
GIVEN = ("placeholder", "get_attr")


@dataclass(frozen=True)
class MatmulToLinear(Pass):
    """Replaces ``x @ weight.T`` by ``linear(x, weight)``.

    Law: ``weight``: two dimensions, an input or attribute of the graph; the lists say the same of products and linears.
    Exactness: bit-exact, but where a pass over linears is not. A bias that is added stays so: of fp32 it makes the sum
    fp32, which a linear's is not.
    """

    lists: OpList
    name: ClassVar[str] = "matmul-to-linear"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every product."""
        mode, changes = fake_mode_of(gm), []
        for node in list(gm.graph.nodes) if self.lists.says_the_same_of(ALIKE) else ():
            weight = _weight(node) if operation(node)[0] in PRODUCTS else None
            if mode is None or weight is None:
                continue
            x, turned = operation(node)[1]
            made = put_call(gm, Formula(x, node, {node}), F.linear, (x, weight), mode)
            if not turned.users:
                gm.graph.erase_node(turned)
            changes.append(Change(self.name, "as a linear", made.name, f"by {weight.name}, turned"))
        return PassResult(gm, tuple(changes))


def _weight(node: Node) -> Node | None:
    """Return the parameter that a product's right operand is, turned; None where that is something else."""
    x, turned = operation(node)[1]
    if not isinstance(x, Node) or not isinstance(turned, Node) or len(turned.all_input_nodes) != 1:
        return None
    source, rows = turned.all_input_nodes[0], captured(x)
    fits = source.op in GIVEN and captured(turned).dim() == 2 and isinstance(rows, torch.Tensor) and rows.dim() >= 2
    return source if fits and rows.dtype == captured(source).dtype and is_transpose_of(turned, source) else None

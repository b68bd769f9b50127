"""Recognize linears that are written as matmuls with a transposed parameter.

Before: ``x @ weight.T``, as in tied output layers and in Falcon, which no pass over linears matches. After:
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

    Law: ``weight`` has two dimensions and is an input or attribute of the graph; the lists have the same rule for
    matmuls and linears. Exactness: bit-exact, except where a later pass over linears is not. The addition of a bias
    stays separate: an fp32 bias makes the sum fp32, which the bias of a linear does not.
    """

    lists: OpList
    name: ClassVar[str] = "matmul-to-linear"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every matmul."""
        mode, changes = fake_mode_of(gm), []
        for node in list(gm.graph.nodes) if self.lists.says_the_same_of(ALIKE) else ():
            weight = _weight(node) if operation(node)[0] in PRODUCTS else None
            if mode is None or weight is None:
                continue
            x, turned = operation(node)[1]
            made = put_call(gm, Formula(x, node, {node}), F.linear, (x, weight), mode)
            if not turned.users:
                gm.graph.erase_node(turned)
            changes.append(Change(self.name, "as a linear", made.name, f"by {weight.name}, transposed"))
        return PassResult(gm, tuple(changes))


def _weight(node: Node) -> Node | None:
    """Return the parameter whose transpose is the right operand of a matmul; None if there is none."""
    x, turned = operation(node)[1]
    if not isinstance(x, Node) or not isinstance(turned, Node) or len(turned.all_input_nodes) != 1:
        return None
    source, rows = turned.all_input_nodes[0], captured(x)
    fits = source.op in GIVEN and captured(turned).dim() == 2 and isinstance(rows, torch.Tensor) and rows.dim() >= 2
    return source if fits and rows.dtype == captured(source).dtype and is_transpose_of(turned, source) else None

"""Turn what weights' gradients are made of by compiled C, in flat graphs: of whole steps, and for Inductor.

Before: ``mm(grad.t(), x)``. After: ``mm(turned_operand(grad.t()), x)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.node_value import value
from amp_graph.passes.operators import OPS
from amp_graph.passes.turned_operand import library, turned_operand
from amp_graph.passes.what_pays import turning_pays

ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class TurnOperands(Pass):
    """Lays the first operand of ``mm`` in rows where its columns lie in memory, when ``what_pays`` says so.

    Law: bf16 matrices on the CPU, in sizes known while they are traced; one copy for all products that read it.
    Exactness: rounding-equal, fp32 sums in another order.
    """

    name: ClassVar[str] = "turn-operands"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every product."""
        changes, made = [], {}
        for node in gm.graph.find_nodes(op="call_function", target=ATEN.mm.default):
            a, b = node.args
            if not (isinstance(a, Node) and isinstance(b, Node) and _pays(value(a), value(b))) or library() is None:
                continue
            if a not in made:
                with gm.graph.inserting_before(node):
                    made[a] = gm.graph.call_function(OPS.turned_operand.default, (a,))
                made[a].meta = {**a.meta, "val": turned_operand(value(a))}
            node.args = (made[a], b)
            changes.append(Change(self.name, "turned", node.name, f"{a.name} lies in columns"))
        return PassResult(gm, tuple(changes))


def _pays(a: Any, b: Any) -> bool:
    if not all(isinstance(t, Tensor) and t.dim() == 2 and t.dtype == torch.bfloat16 for t in (a, b)):
        return False
    if any(type(n) is not int for n in (*a.shape, *a.stride(), *b.shape, *b.stride())):
        return False
    lies = a.stride(0) == 1 and a.stride(1) >= a.shape[0] > 1 and b.stride(1) == 1
    return lies and turning_pays(a.device.type, a.dtype, a.shape[1], a.shape[0], b.shape[1])

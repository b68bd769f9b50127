"""Let compiled C make what weights' gradients are, in flat graphs: of whole steps, and for Inductor.

Before: ``mm(grad.t(), x)``. After: ``amx_product(grad.t(), x)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.amx_product import library
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.node_value import value
from amp_graph.passes.operators import OPS
from amp_graph.passes.what_pays import amx_product_pays

ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class AmxProducts(Pass):
    """Replaces ``mm`` whose first operand's columns lie in memory with ``amx_product``, when ``what_pays`` says so.

    Law: bf16 matrices on the CPU, in sizes known while they are traced. Exactness: rounding-equal, fp32 sums in another
    order.
    """

    name: ClassVar[str] = "amx-products"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every product."""
        changes = []
        for node in gm.graph.find_nodes(op="call_function", target=ATEN.mm.default):
            a, b = node.args
            if not (isinstance(a, Node) and isinstance(b, Node) and _pays(value(a), value(b))) or library() is None:
                continue
            node.target, node.args = OPS.amx_product.default, (a, b, None, False)
            changes.append(Change(self.name, "own kernel", node.name, f"{a.name} lies in columns"))
        return PassResult(gm, tuple(changes))


def _pays(a: Any, b: Any) -> bool:
    if not all(isinstance(t, Tensor) and t.dim() == 2 and t.dtype == torch.bfloat16 for t in (a, b)):
        return False
    if any(type(n) is not int for n in (*a.shape, *a.stride(), *b.shape, *b.stride())):
        return False
    lies = a.stride(0) == 1 and a.stride(1) >= a.shape[0] > 1 and b.stride(1) == 1
    return lies and amx_product_pays(a.device.type, a.dtype, a.shape[1], a.shape[0], b.shape[1])

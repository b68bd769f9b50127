"""Lower small matmuls to a kernel of ours, in the flat graphs that Inductor generates code from.

Before: ``mm(x, w.t())`` or ``relu(linear_bias(x, w, b))``, calls of oneDNN.
After: ``amp_graph::small_product(x, w.t(), b, True)``, which Inductor compiles along with its own kernels
(``small_gemm_template.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.inductor.small_gemm_template import OPS
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.profitability.gemm_thresholds import small_product_is_profitable
from amp_graph.passes.torch_compat.versions import takes_kernels_of_ours

ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class LowerSmallGemm(Pass):
    """Replaces ``mm(a, b)`` and ``linear_bias(x, w, b)`` with ``small_product`` when it is profitable.

    Law: bf16 matrices on the CPU, of sizes known at trace time, whose rows or columns are contiguous. A relu that is
    the only reader of the result is fused; ours propagates NaN. Exactness: rounding-equal; sums are fp32 in another
    order, rounded once, bias included.
    """

    name: ClassVar[str] = "lower-small-gemm"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every matmul."""
        changes = []
        found = [n for n in gm.graph.nodes if n.target in (ATEN.mm.default, OPS.linear_bias.default)]
        for node in found if takes_kernels_of_ours() else ():
            if not _fits(node):
                continue
            relu = _relu(node)
            last = node if relu is None else relu
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(OPS.small_product.default, (*_operands(gm, node), relu is not None))
            made.meta = dict(last.meta)
            last.replace_all_uses_with(made)
            for gone in (relu, node):
                if gone is not None:
                    gm.graph.erase_node(gone)
            changes.append(Change(self.name, "small product", made.name, "a call of oneDNN takes longer"))
        return PassResult(gm, tuple(changes))


def _fits(node: Node) -> bool:
    """Say whether the kernel supports the operands of ``node``, and is profitable."""
    if node.kwargs or not all(isinstance(n, Node) for n in node.args[:2]):
        return False
    tensors: list[Tensor] = [value(n) for n in node.args[:2]]  # type: ignore[arg-type]
    sizes = [size for t in (*tensors, value(node)) for size in (*t.shape, *t.stride())]
    if any(type(size) is not int for size in sizes) or not all(1 in t.stride() for t in tensors):
        return False
    (rows, depth), columns = tensors[0].shape, value(node).shape[1]
    alike = all(t.dtype == value(node).dtype for t in tensors)
    return alike and small_product_is_profitable(tensors[0].device.type, tensors[0].dtype, rows, columns, depth)


def _relu(node: Node) -> Node | None:
    """Return the relu that is the only reader of ``node``."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and user is not None and user.target is ATEN.relu.default else None


def _operands(gm: GraphModule, node: Node) -> tuple[Any, ...]:
    """Return left operand, right operand and bias of a matmul."""
    if node.target is ATEN.mm.default:
        return (*node.args, None)
    x, weight, bias = node.args
    assert isinstance(weight, Node), "seen by _fits"
    turned = gm.graph.call_function(ATEN.permute.default, (weight, [1, 0]))
    turned.meta = {**weight.meta, "val": value(weight).t()}
    return x, turned, bias

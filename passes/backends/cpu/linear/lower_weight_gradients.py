"""Lower the gradients of weights and biases to compiled C, in flat graphs: of whole steps, and for Inductor.

Before: ``mm(grad.t(), x)``, ``sum(grad, 0)``.
After: ``amx_product_and_sums(grad, x)``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear.amx_gemm import library
from amp_graph.passes.base import Change
from amp_graph.passes.graph.call_arguments import FLAT_TRANSPOSES
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.native.gemm_thresholds import amx_product_is_profitable, one_of_two_threads_idles
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import FakeTensorMode, is_number

ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class LowerWeightGradients(NodePass):
    """Replaces ``mm`` with a column-major first operand with ``amx_product``, when it is profitable.

    Also replaces sums over these columns, if a matmul reads them anyway; and ``mm`` and ``addmm`` for which oneDNN
    leaves one of two threads idle. Law: bf16 matrices on the CPU, of sizes known at trace time. Exactness:
    rounding-equal, fp32 sums in another order.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Lower a matmul."""
        if node.target not in (ATEN.mm.default, ATEN.addmm.default):
            return None
        given: list[Any] = [value(n) if isinstance(n, Node) else None for n in node.args]
        if node.kwargs or not all(map(_is_known, given)):
            return None
        *bias, a, b = node.args
        columns = not bias and _is_profitable(*given)
        if not (columns or one_thread_idles(*given)) or library() is None:
            return None
        added = _added_up(node, a) if columns else None  # type: ignore[arg-type]
        if added is not None:
            _with_sums(gm, node, b, added)  # type: ignore[arg-type]
        else:
            node.target, node.args = OPS.amx_product.default, (a, b, *bias)
        why = f"{a} lies in columns" if columns else "oneDNN's leaves a thread idle"
        return Change(self.name, "own kernel", node.name, why)


def _is_known(operand: Any) -> bool:
    """Say whether an operand is bf16, of sizes and strides known at trace time."""
    low = isinstance(operand, Tensor) and operand.dtype == torch.bfloat16
    return low and is_number(*operand.shape, *operand.stride())


def one_thread_idles(*given: Tensor) -> bool:
    """Say whether ``mm``, or ``addmm`` with a bias per column, leaves a thread of oneDNN idle, but none of ours."""
    *bias, a, b = given
    fits = all(t.dim() == 2 and 1 in t.stride() for t in (a, b)) and all(t.shape == b.shape[1:] for t in bias)
    return fits and one_of_two_threads_idles(a.device.type, a.dtype, a.shape[0], b.shape[1], a.shape[1])


def _added_up(product: Node, a: Node) -> Node | None:
    """Return the node that sums the columns of the transpose of ``a`` after ``product``; None if there is none."""
    source = a.args[0] if a.target in FLAT_TRANSPOSES else None
    if not isinstance(source, Node) or value(source).dim() != 2:
        return None
    sums = (user for user in source.users if user.target is ATEN.sum.dim_IntList and not user.kwargs)
    return next((s for s in sums if list(s.args[1]) in ([0], [-2]) and product < s), None)  # type: ignore[arg-type]


def _with_sums(gm: GraphModule, product: Node, b: Node, added: Node) -> None:
    """Replace ``product`` and the sums ``added``, which may keep that dimension, with one call."""
    source = added.args[0]
    with gm.graph.inserting_before(product):
        both = gm.graph.call_function(OPS.amx_product_and_sums.default, (source, b))
        parts = [gm.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        flat = value(added).view(-1)
        both.meta = {**product.meta, "val": [value(product), flat]}
        parts[0].meta, parts[1].meta = dict(product.meta), {**added.meta, "val": flat}
        if value(added).dim() == 2:
            parts[1] = gm.graph.call_function(ATEN.unsqueeze.default, (parts[1], 0))
            parts[1].meta = dict(added.meta)
    turned = product.args[0]
    for old, new in zip((product, added), parts, strict=True):
        old.replace_all_uses_with(new)
        gm.graph.erase_node(old)
    if isinstance(turned, Node) and not turned.users:
        gm.graph.erase_node(turned)


def _is_profitable(a: Tensor, b: Tensor) -> bool:
    lies = a.stride(0) == 1 and a.stride(1) >= a.shape[0] > 1 and b.stride(1) == 1
    return lies and amx_product_is_profitable(a.device.type, a.dtype, a.shape[1], a.shape[0], b.shape[1])

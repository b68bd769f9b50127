"""Use one matmul, instead of two and a sum, for the gradient of a gram matrix.

Before: ``x @ x.mT``, whose gradient is ``g @ x + g.mT @ x``.
After: ``own_product(x)``, with the gradient ``(g + g.mT) @ x``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION, TRANSFORM
from amp_graph.passes.graph.node_info import calls_torch
from amp_graph.passes.op_args.transposes import is_transpose_of
from amp_graph.passes.profitability.gemm_thresholds import own_product_is_profitable
from amp_graph.passes.torch_compat.double_backward import leaves_to_torch

PRODUCTS = {("aten.matmul",), ("aten.bmm",), ("aten.mm",)}


@dataclass(frozen=True)
class FuseGramMatrix(Pass):
    """Replaces ``x @ x.mT`` that trains with ``own_product(x)``, when it is profitable.

    Law: both operands are the same memory, one of them transposed: pairwise products of recommenders, gram matrices.
    The gradient is rounded once, and the sum of ``g`` and ``g.mT`` before it, where two were rounded and added.
    Exactness: forward bit-exact, gradients rounding-equal.
    """

    name: ClassVar[str] = "fuse-gram-matrix"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every matmul of two operands."""
        changes = []
        for node in list(gm.graph.nodes):
            rows = _own_rows(node)
            if rows is None:
                continue
            turned = next((n for n in node.all_input_nodes if n is not rows), None)
            node.op, node.target, node.args, node.kwargs = "call_function", own_product, (rows,), {}
            if turned is not None and not turned.users:
                gm.graph.erase_node(turned)
            changes.append(Change(self.name, "one gradient", node.name, f"{rows.name} by its own transpose"))
        return PassResult(gm, tuple(changes))


def _own_rows(node: Node) -> Node | None:
    """Return ``x`` where ``node`` is ``x @ x.mT`` and this is profitable, else None."""
    if names_of(node) not in PRODUCTS or len(node.args) != 2 or node.kwargs or not calls_torch(node):
        return None
    if not is_trained(node):
        return None
    if not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta) or not all(isinstance(n, Node) for n in node.args):
        return None
    rows: Any = node.args[0]
    columns = node.args[1]
    if not is_transpose_of(columns, rows) and not is_transpose_of(rows, columns):
        return None
    shape = value(rows).shape
    if any(type(size) is not int for size in shape):
        return None
    return rows if own_product_is_profitable(value(node).device.type, shape[-2], shape[-1]) else None


class _OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = (grad + grad.mT) @ x
        return found


def own_product(x: Tensor) -> Tensor:
    """Return ``x @ x.mT`` of ``x`` [..., rows, width]: [..., rows, rows]."""
    if leaves_to_torch(x) or not (torch.is_grad_enabled() and x.requires_grad):
        return x @ x.mT
    found: Tensor = _OwnProduct.apply(x)
    return found

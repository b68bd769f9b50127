"""Lower linears in training to compiled C where they have few rows.

Before: ``linear(x, w, b)``, in bf16 on CPU.
After: ``linear_low(x, w, b)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear import amx_gemm, panel_gemm
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear, room, side_by_side
from amp_graph.passes.backends.cpu.linear.panel_gemm import as_rows, library, product
from amp_graph.passes.base import Change
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.native.gemm_thresholds import (
    MOST_OF_A_CALL,
    small_linear_is_profitable,
)
from amp_graph.passes.native.operator_library import called, define_as_typed
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch, unsafe_view
from amp_graph.passes.torch_compat.fake import FakeTensorMode, is_number


def linear_low(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` of bf16 CPU tensors in training, whose sums are rounded once, bias included.

    x: [..., inputs]; weight: [outputs, inputs]; bias: [outputs] or None. Tensors without readable memory use torch's.
    """
    if leaves_to_torch(x, weight, bias):
        return F.linear(x, weight, bias)
    found: Tensor = _Linear.apply(x, weight, bias)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        rows = called(product_low, as_rows(x), weight.t(), bias)
        # Here, which spares two nodes of autograd. No view: one that a Function returns cannot be written.
        return rows if x.dim() == 2 else unsafe_view(rows, (*x.shape[:-1], rows.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        plain, rows, of_rows = is_plain(grad), as_rows(grad), None
        if of_x:
            made = torch.mm(rows, weight) if plain else called(product_low, rows, weight)
            of_rows = made.view(*grad.shape[:-1], weight.shape[1])
        if not of_weight:
            return of_rows, None, rows.sum(0) if of_bias else None
        read = as_rows(x)
        if plain or by_units(rows.numel() * read.shape[1]):
            return of_rows, *gradients_of_linear(rows, read, biased=of_bias)
        return of_rows, called(product_low, rows.t(), read), rows.sum(0) if of_bias else None


def product_low(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias`` of bf16 matrices by compiled C, or without a kernel by torch, rounded once."""
    if library() is None or by_units(a.numel() * b.shape[1]):
        return amx_gemm.amx_product(a, b, bias)
    return product(side_by_side(a), side_by_side(b), bias)


def by_units(multiplications: int) -> bool:
    """Say whether a matmul with this many ``multiplications`` uses the kernel for the matrix units."""
    return multiplications > MOST_OF_A_CALL and amx_gemm.library() is not None


# An operator, so that a traced graph (TrainStep's) has one node.
define_as_typed(product_low, room)


@dataclass(frozen=True)
class LowerLinears(NodePass):
    """Replaces ``linear(x, w, b)`` that trains over few rows with ``linear_low`` when it is profitable.

    Law: the same matmul, and the same two in backward, all in compiled C. Exactness: rounding-equal, fp32 sums in
    another order, rounded once, bias included.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Lower a linear."""
        given = _operands(node)
        if given is None or not _is_profitable(node, *given) or panel_gemm.library() is None:
            return None
        again = node.target is computing_again(F.linear)
        node.op, node.target = "call_function", computing_again(linear_low) if again else linear_low
        node.args, node.kwargs = given, {}
        return Change(self.name, "lowered", node.name, "by compiled C: oneDNN's calls take longer than the matmuls")


def _operands(node: Node) -> tuple[Any, ...] | None:
    """Return input, weight and bias of a linear that trains; None for anything else."""
    if names_of(node) != ("aten.linear",) or node.op != "call_function" or REGION in node.meta or not is_trained(node):
        return None
    given = arguments_of(node)
    return None if given is None else (given["input"], given["weight"], given["bias"])


def _is_profitable(node: Node, x: Node, weight: Node, bias: Node | None) -> bool:
    """Say whether ``node`` is a linear of matrices of known sizes, and of few rows."""
    made, given = value(node), [value(source) for source in node.all_input_nodes]
    if any(type(t) is not type(made) or t.dtype != made.dtype for t in given) or x is weight:
        return False
    if value(weight).dim() != 2 or not is_number(*(size for t in (made, *given) for size in t.shape)):
        return False
    outputs, inputs = value(weight).shape
    plain = bias is None or tuple(value(bias).shape) == (outputs,)  # linear broadcasts it
    rows = made.numel() // max(1, outputs)
    return plain and small_linear_is_profitable(made.device.type, made.dtype, rows, outputs, inputs)

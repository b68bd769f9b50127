"""Multiply the rows of experts, whose number changes at each call, with compiled C that needs no kernel per size.

Before: ``grouped_mm_fallback(x, weight.mT, offs)`` in bf16 on CPU: a matmul per expert; oneDNN compiles a kernel for
each number of rows.
After: ``grouped_product(x, weight, offs, True)``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear.linear_functions import multiply_into
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.op_args.transposes import is_transpose_of
from amp_graph.passes.profitability.gemm_thresholds import grouped_product_is_profitable
from amp_graph.passes.registry import ONE_WEIGHT_GRADIENT, declare
from amp_graph.passes.torch_compat.autograd import takes_fp32
from amp_graph.passes.torch_compat.dispatch import is_seen
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch

# Operators that multiply consecutive groups of rows, and their arguments in this order.
GROUPED = {
    "transformers.grouped_mm_fallback": ("input", "weight", "offs"),
    "aten._grouped_mm": ("self", "mat2", "offs"),
}
ONE_WEIGHT_GRADIENT.update(GROUPED)
PLAIN = {"bias": None, "out_dtype": None}  # accepted values of the other arguments


@dataclass(frozen=True)
class GroupedGemm(Pass):
    """Replaces grouped matmuls with compiled C, when it is profitable.

    Law: x: [rows, depth], weight: [groups, depth, columns], bf16; ``offs``: where each group's rows end. The weight's
    gradient is fp32 where its copy accepts that. Exactness: rounding-equal, fp32 sums in another order, rounded once.
    """

    name: ClassVar[str] = "grouped-gemm"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every grouped matmul."""
        changes = []
        for node in list(gm.graph.nodes):
            given = _given(node)
            if given is None:
                continue
            x, weight, offs = given
            source = weight.all_input_nodes[0] if len(weight.all_input_nodes) == 1 else None
            turned = source is not None and is_transpose_of(weight, source)
            node.op, node.target, node.kwargs = "call_function", grouped_product, {}
            node.args = (x, source if turned else weight, offs, turned)
            if not weight.users:
                gm.graph.erase_node(weight)
            changes.append(Change(self.name, "own kernel", node.name, "no kernel is compiled for each number of rows"))
        return PassResult(gm, tuple(changes))


def _given(node: Node) -> tuple[Node, Node, Node] | None:
    """Return the operands of ``node``, and the ends of its groups; None if it stays."""
    names = names_of(node)
    if len(names) != 1 or names[0] not in GROUPED or not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return None
    op = node.meta[IDENTITY].operations[0].op
    given = arguments_of(node, op)
    if given is None:
        return None
    operands = tuple(given.pop(name) for name in GROUPED[names[0]])
    if not all(isinstance(n, Node) for n in operands) or given.items() - PLAIN.items():
        return None
    x, weight, offs = (value(n) for n in operands)
    fits = (x.dim(), weight.dim(), offs.dim()) == (2, 3, 1) and x.dtype == weight.dtype == value(node).dtype
    return operands if fits and grouped_product_is_profitable(x.device.type, x.dtype) else None


def grouped_product(x: Tensor, weight: Tensor, offs: Tensor, turned: bool) -> Tensor:
    """Return the product of each row of ``x`` and its group's weight: [rows, columns]; zeros after the last group.

    x: [rows, depth]; weight: [groups, depth, columns], or ``turned`` [groups, columns, depth]; all bf16 on the CPU.
    offs: [groups], non-decreasing integers: where the rows of each group end.
    """
    if leaves_to_torch(x, weight, offs):
        return _by_torch(x, weight, offs, turned)
    found: Tensor = _Grouped.apply(x, weight, offs, turned)
    return found


declare(grouped_product, fp32_weight_gradient=True)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, turned: bool) -> Tensor:
        of_x, of_weight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, offs)
        ctx.turned, ctx.groups = turned, len(weight)
        found: Tensor = _calls(x).rows_by_groups(x, weight, offs, turned)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offs = ctx.saved_tensors
        (of_x, of_weight, _, _), turned = ctx.needs_input_grad, ctx.turned
        if is_plain(grad):
            of_rows = _by_torch(grad, weight, offs, not turned) if of_x else None
            return of_rows, _gradient_by_torch(grad, x, offs, turned) if of_weight else None, None, None
        calls, wide = _calls(grad), takes_fp32(ctx, 1)
        of_rows = calls.rows_by_groups(grad, weight, offs, not turned) if of_x else None
        a, b = (grad, x) if turned else (x, grad)
        return of_rows, calls.gradient_by_groups(a, b, offs, ctx.groups, wide) if of_weight else None, None, None


def _calls(x: Tensor) -> Any:
    return OPS if is_seen(x) else sys.modules[__name__]


def rows_by_groups(x: Tensor, weight: Tensor, offs: Tensor, turned: bool) -> Tensor:
    """Return what ``grouped_product`` does, without gradients. Raises MemoryError."""
    made, end = _room(x, weight, turned), 0
    for group, start, end in _groups(offs):
        multiply_into(made[start:end], x[start:end], weight[group].t() if turned else weight[group])
    made[end:].zero_()
    return made


def gradient_by_groups(a: Tensor, b: Tensor, offs: Tensor, groups: int, wide: bool) -> Tensor:
    """Return ``a.t() @ b`` of the rows of each group: [groups, a's columns, b's]; fp32 where ``wide``, else bf16.

    a: [rows, columns]; b: [rows, columns]; both bf16. Raises MemoryError.
    """
    made = _room_of_gradient(a, b, groups, wide)
    filled = set()
    for group, start, end in _groups(offs):
        multiply_into(made[group], a[start:end].t(), b[start:end])
        filled.add(group)
    for group in set(range(groups)) - filled:
        made[group].zero_()
    return made


def _groups(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the number, the first row, and the end of each group that has rows."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, start, end
            start = end


def _by_torch(x: Tensor, weight: Tensor, offs: Tensor, turned: bool) -> Tensor:
    parts = [x[start:end] @ (weight[g].t() if turned else weight[g]) for g, start, end in _groups(offs)]
    behind = len(x) - sum(map(len, parts))
    return torch.cat([*parts, x.new_zeros((behind, weight.shape[1 if turned else 2]))])


def _gradient_by_torch(grad: Tensor, x: Tensor, offs: Tensor, turned: bool) -> Tensor:
    a, b = (grad, x) if turned else (x, grad)
    empty = a[:0].t() @ b[:0]
    made = {group: a[start:end].t() @ b[start:end] for group, start, end in _groups(offs)}
    return torch.stack([made.get(group, empty) for group in range(len(offs))])


def _room(x: Tensor, weight: Tensor, turned: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1 if turned else 2]))


def _room_of_gradient(a: Tensor, b: Tensor, groups: int, wide: bool) -> Tensor:
    return a.new_empty((groups, a.shape[1], b.shape[1]), dtype=torch.float32 if wide else a.dtype)


define_as_typed(rows_by_groups, _room)
define_as_typed(gradient_by_groups, _room_of_gradient)

"""Lower linears in training to compiled C where they have few rows, and to oneDNN's fast forms where they have many.

Before: ``linear(x, w, b)``, in bf16 on CPU.
After: ``linear_low(x, w, b)`` for 32 rows, ``linear_trained(x, w, b)`` for 1,024.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear import amx_gemm, panel_gemm
from amp_graph.passes.backends.cpu.linear.linear_functions import linear_low, linear_trained
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.native.gemm_thresholds import (
    amx_product_is_profitable,
    bias_in_trained_linear_is_profitable,
    small_linear_is_profitable,
    training_by_function_is_profitable,
)
from amp_graph.passes.pipeline_options import PipelineOptions

RECURRENT = frozenset({"aten.lstm", "aten.gru"})
# Multiplications of a trained linear up to which torch's is faster in a graph with a recurrent layer. A step with an
# LSTM of 32 states and a linear of 32 x 64, over ``torch.autocast``'s: 1.05 by our function for 4 and for 16 rows,
# 0.995 by torch's linear. The function's forward takes 45 to 65 us longer there, its backward 15 less; in a graph of
# linears alone it takes 0.8 to 0.95 of torch's time.
MOST_BEHIND_RECURRENCE = 1 << 15
CALLS = (F.linear, torch.ops.aten.linear.default)  # the latter for composites that were expanded
Form = tuple[str, torch.dtype, int, int, int]  # device, dtype, rows, outputs, inputs


@dataclass(frozen=True)
class LowerLinears(Pass):
    """Replaces ``linear(x, w, b)`` that trains with ``linear_low``, or ``linear_trained``, when it is profitable.

    Law: the same matmul, and the same two in backward. ``linear_low`` computes all three in compiled C.
    ``linear_trained`` leaves the first and the gradient of ``x`` to oneDNN; the first one takes the bias, where torch
    first copies it into every row of the result; the weight's gradient is compiled C's. Exactness: rounding-equal, fp32
    sums in another order, rounded once, bias included.
    """

    options: PipelineOptions
    name: ClassVar[str] = "lower-linears"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every linear."""
        changes = []
        recurs = any(RECURRENT.intersection(names_of(node)) for node in gm.graph.nodes)
        for node in gm.graph.nodes:
            form, again = linear_form(node), node.target is computing_again(F.linear)
            if form is None:
                continue
            by_c = small_linear_is_profitable(*form) and panel_gemm.library() is not None
            if by_c and (not recurs or prod(form[2:]) > MOST_BEHIND_RECURRENCE):
                target, why = linear_low, "by compiled C: oneDNN's calls take longer than the matmuls"
            elif (again or node.target in CALLS) and (fast := self._fast_parts(node, form)):
                target, why = linear_trained, f"by its fast path for training: {', '.join(fast)}"
            else:
                continue
            node.op, node.target = "call_function", computing_again(target) if again else target
            changes.append(Change(self.name, "lowered", node.name, why))
        return PassResult(gm, tuple(changes))

    def _fast_parts(self, node: Node, form: Form) -> list[str]:
        """Return what ``linear_trained`` does better than torch for a linear of this size."""
        # In a step, matmuls are nodes, and not autograd functions.
        if not (self.options.in_step or training_by_function_is_profitable(*form[2:])):
            return []
        biased = bias_of(node) is not None and bias_in_trained_linear_is_profitable(*form)
        by_c = amx_product_is_profitable(*form) and amx_gemm.library() is not None
        return ["its bias in the matmul"] * biased + ["its weight's gradient by C"] * by_c


def linear_form(node: Node) -> Form | None:
    """Return device, dtype, rows, outputs and inputs of a linear of matrices that trains; None for anything else."""
    if names_of(node) != ("aten.linear",) or node.op != "call_function" or REGION in node.meta or not is_trained(node):
        return None
    if len(node.args) < 2 or arguments_of(node, torch.ops.aten.linear.default) is None:
        return None
    given = [value(source) for source in node.all_input_nodes]
    made = value(node)
    if any(type(t) is not type(made) or t.dtype != made.dtype for t in given) or len(node.all_input_nodes) < 2:
        return None
    weight = value(node.args[1]) if isinstance(node.args[1], Node) else None
    sizes = [size for t in (made, *given) for size in t.shape]
    if weight is None or weight.dim() != 2 or any(type(size) is not int for size in sizes):
        return None
    outputs, inputs = weight.shape
    bias = bias_of(node)
    if isinstance(bias, Node) and tuple(value(bias).shape) != (outputs,):  # linear broadcasts it
        return None
    return made.device.type, made.dtype, made.numel() // max(1, outputs), outputs, inputs


def bias_of(node: Node) -> Any:
    """Return the bias of a linear, None if it has none."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")

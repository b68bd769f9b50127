"""Lower linears in training to compiled C where they have few rows.

Before: ``linear(x, w, b)``, in bf16 on CPU.
After: ``linear_low(x, w, b)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear import panel_gemm
from amp_graph.passes.backends.cpu.linear.linear_functions import linear_low
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import arguments_of, names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.native.gemm_thresholds import (
    small_linear_is_profitable,
)

Form = tuple[str, torch.dtype, int, int, int]  # device, dtype, rows, outputs, inputs


@dataclass(frozen=True)
class LowerLinears(Pass):
    """Replaces ``linear(x, w, b)`` that trains over few rows with ``linear_low`` when it is profitable.

    Law: the same matmul, and the same two in backward, all in compiled C. Exactness: rounding-equal, fp32 sums in
    another order, rounded once, bias included.
    """

    name: ClassVar[str] = "lower-linears"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every linear."""
        changes = []
        for node in gm.graph.nodes:
            form, again = linear_form(node), node.target is computing_again(F.linear)
            if form is None or not small_linear_is_profitable(*form) or panel_gemm.library() is None:
                continue
            node.op, node.target = "call_function", computing_again(linear_low) if again else linear_low
            why = "by compiled C: oneDNN's calls take longer than the matmuls"
            changes.append(Change(self.name, "lowered", node.name, why))
        return PassResult(gm, tuple(changes))


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

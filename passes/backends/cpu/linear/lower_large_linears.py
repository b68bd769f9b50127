"""Lower linears in training over many rows to the forms for which oneDNN is fast, or to compiled C.

Before: ``linear(x, w, b)`` of 1,024 rows, in bf16 on CPU.
After: ``linear_trained(x, w, b)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from amp_graph.passes.backends.cpu.linear.amx_gemm import library
from amp_graph.passes.backends.cpu.linear.linear_functions import linear_trained
from amp_graph.passes.backends.cpu.linear.lower_small_linears import bias_of, linear_form
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.memory.ops_with_recomputed_inputs import computing_again
from amp_graph.passes.profitability.gemm_thresholds import (
    amx_product_is_profitable,
    bias_in_trained_linear_is_profitable,
    training_by_function_is_profitable,
)

CALLS = (F.linear, torch.ops.aten.linear.default)  # the latter for composites that were expanded


@dataclass(frozen=True)
class LowerLargeLinears(Pass):
    """Replaces ``linear(x, w, b)`` that trains with ``linear_trained(x, w, b)`` when it is profitable.

    Law: the same matmuls; the first and the gradient of ``x`` by oneDNN. The first one takes the bias, where torch
    first copies it into every row of the result; the weight's gradient is compiled C's. Exactness: rounding-equal, fp32
    sums in another order, rounded once, bias included.

    ``in_step``: whether the graph will be a step's, whose matmuls are nodes, and not autograd functions.
    """

    in_step: bool = False
    name: ClassVar[str] = "lower-large-linears"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every linear that no other pass has taken."""
        changes = []
        for node in gm.graph.nodes:
            form, again = linear_form(node), node.target is computing_again(F.linear)
            if form is None or not (again or node.target in CALLS):
                continue
            if not (self.in_step or training_by_function_is_profitable(*form[2:])):
                continue
            biased = bias_of(node) is not None and bias_in_trained_linear_is_profitable(*form)
            how = ["its bias in the matmul"] if biased else []
            how += ["its weight's gradient by C"] if amx_product_is_profitable(*form) and library() is not None else []
            if how:
                node.target = computing_again(linear_trained) if again else linear_trained
                changes.append(Change(self.name, "by its fast path for training", node.name, ", ".join(how)))
        return PassResult(gm, tuple(changes))

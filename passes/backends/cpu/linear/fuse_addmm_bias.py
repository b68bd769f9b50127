"""Fuse the bias into the matmul kernel, in flat graphs: of whole steps, and for Inductor.

Before: ``addmm(b, x, w.t())``, which copies ``b`` into every row of the result and then adds the matmul to it.
After: ``amp_graph::linear_bias(x, w, b)``, one call of oneDNN. A relu behind it stays: oneDNN's turns NaN into 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import one_thread_idles
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.op_args.transposes import FLAT_TRANSPOSES
from amp_graph.passes.profitability.gemm_thresholds import bias_in_product_is_profitable
from amp_graph.passes.torch_compat.onednn import linear_pointwise

ATEN: Any = torch.ops.aten


@dataclass(frozen=True)
class FuseAddmmBias(Pass):
    """Replaces ``addmm(b, x, w.t())`` with ``linear_bias(x, w, b)`` when it is profitable.

    Law: ``x`` and ``w`` are contiguous, of sizes known at trace time. Exactness: rounding-equal; sums are fp32 in
    another order, rounded once, bias included.
    """

    name: ClassVar[str] = "fuse-addmm-bias"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every matmul with a bias."""
        changes = []
        for node in gm.graph.find_nodes(op="call_function", target=ATEN.addmm.default):
            weight = _weight(node)
            if weight is None or linear_pointwise is None or one_thread_idles(node):
                continue
            bias, x, turned = node.args
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(OPS.linear_bias.default, (x, weight, bias))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            for gone in (node, turned):
                if isinstance(gone, Node) and not gone.users:
                    gm.graph.erase_node(gone)
            changes.append(Change(self.name, "bias in the product", made.name, "the kernel adds it without a copy"))
        return PassResult(gm, tuple(changes))


def _weight(node: Node) -> Node | None:
    """Return the weight, [outputs, inputs], of a matmul that is a linear of rows; None for any other."""
    bias, x, turned = node.args
    weight = turned.args[0] if isinstance(turned, Node) and turned.target in FLAT_TRANSPOSES else None
    if node.kwargs or not all(isinstance(n, Node) for n in (bias, x, weight)):
        return None
    assert isinstance(weight, Node), "seen above"
    assert isinstance(turned, Node), "what has the weight as its argument"
    tensors = [value(n) for n in (weight, x, bias)]  # type: ignore[arg-type]
    if [t.dim() for t in tensors] != [2, 2, 1] or any(type(n) is not int for t in tensors for n in t.shape):
        return None
    (outputs, inputs), device = tensors[0].shape, tensors[0].device.type
    fits = value(turned).shape == (inputs, outputs) and tensors[2].shape == (outputs,)
    if not fits or not all(t.is_contiguous() and t.dtype == tensors[1].dtype for t in tensors):
        return None
    return weight if bias_in_product_is_profitable(device, tensors[1].dtype, outputs, inputs) else None


def _linear_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


define_operator("linear_bias(Tensor x, Tensor weight, Tensor bias) -> Tensor", _linear_bias, _fake)

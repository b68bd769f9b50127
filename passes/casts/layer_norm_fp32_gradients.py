"""Compute parameter gradients of layer norms with low-precision input in fp32, as the CPU kernel loses them.

Before: ``layer_norm(x_bf16, weight, bias)``. After: ``layer_norm_low(x_bf16, weight, bias)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.graph.fake_values import captured, value
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import GRAD
from amp_graph.passes.graph.node_info import HALVES, calls_torch


@dataclass(frozen=True)
class Fp32NormGradients(Pass):
    """Replaces ``layer_norm`` with ``layer_norm_low`` when its input is low precision and its fp32 parameters train.

    Only on CPU, whose kernel sums the parameter gradients in low precision. Exactness: the result and the
    input gradient are bit-exact; the parameter gradients are more accurate.
    """

    name: ClassVar[str] = "fp32-norm-gradients"
    required: ClassVar[bool] = True

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every layer norm."""
        changes = []
        for node in gm.graph.nodes:
            if _loses_gradients(node):
                node.target = layer_norm_low
                changes.append(Change(self.name, "protected", node.name, "the CPU kernel would lose dweight and dbias"))
        return PassResult(gm, tuple(changes))


def _loses_gradients(node: Node) -> bool:
    if node.op != "call_function" or names_of(node) != ("aten.layer_norm",) or not calls_torch(node):
        return False
    if (
        node.target is layer_norm_low
        or len(node.args) < 3
        or set(node.kwargs) - {"bias", "eps", "cudnn_enable"}
        or not node.meta.get(GRAD, True)
    ):
        return False
    source, weight = node.args[0], node.args[2]
    if not isinstance(source, Node) or not isinstance(weight, Node):
        return False
    x, w = value(source), value(weight)
    return x.dtype in HALVES and x.device.type == "cpu" and w.dtype == torch.float32 and captured(weight).requires_grad

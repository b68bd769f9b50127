"""Compute the gradients of a group norm of channels_last images with compiled C.

Before: ``group_norm(x, 8, weight, bias)``.
After: ``group_norm_low(x, 8, weight, bias, 1e-5)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.norm.group_norm_kernel import group_norm_low, library
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.layout.memory_format import is_channels_last
from amp_graph.passes.native.jit_compiler import CompilerError
from amp_graph.passes.profitability.conv_thresholds import group_norm_backward_is_profitable
from amp_graph.passes.torch_compat.fake import numel

SCHEMA = torch.ops.aten.group_norm.default
NAMES = ("input", "num_groups", "weight", "bias", "eps")


@dataclass(frozen=True)
class LowerGroupNorm(Pass):
    """Replaces ``group_norm`` with ``group_norm_low`` when it trains and this is profitable.

    Law: low-precision channels_last images on the CPU, fp32 parameters, in no region whose precision the user set.
    Exactness: forward bit-exact; gradients rounding-equal, with sums in another order.
    """

    name: ClassVar[str] = "lower-group-norm"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every group norm that trains."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            if node.target is not F.group_norm or names_of(node) != ("aten.group_norm",) or not is_trained(node):
                continue
            given = node_info.schema_arguments(SCHEMA, node.args, dict(node.kwargs))
            reason = "inside a region that affects what is computed" if REGION in node.meta else _why_not(given)
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            node.target, node.args, node.kwargs = group_norm_low, tuple(given[name] for name in NAMES), {}
            changes.append(Change(self.name, "gradients", node.name, "by compiled C, place by place"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _why_not(given: dict[str, Any]) -> str:
    """Return why a norm stays as it is, or ""."""
    x, parameters = value(given["input"]), [given["weight"], given["bias"]]
    if not all(isinstance(p, Node) and value(p).dtype == torch.float32 for p in parameters):
        return "it has no weight and bias in fp32"
    if x.dtype.itemsize != 2 or not is_channels_last(x):
        return "its images are not channels_last in low precision"
    if not group_norm_backward_is_profitable(x.device.type, numel(x)):
        return f"torch's gradients are as fast for {tuple(x.shape)} on {x.device.type}"
    try:
        library(x.dtype)
    except CompilerError as error:
        return str(error).partition("\n")[0]
    return ""

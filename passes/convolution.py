"""Give convolutions of small images a weight gradient that is one product, where the kernel's own is slower.

Before: ``conv2d(x, w, None, 2, 1)`` in bf16 on CPU. After: ``conv2d_low(x, w, None, (2, 2), (1, 1))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes import facts
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.convolution_backward import conv2d_low
from amp_graph.passes.identify_ops import names_of
from amp_graph.passes.image_layout import is_channels_last, is_image
from amp_graph.passes.node_value import value
from amp_graph.passes.regions import REGION, is_trained
from amp_graph.passes.torch_private import concrete_size
from amp_graph.passes.what_pays import weight_gradient_by_product_pays

CONV2D = torch.ops.aten.conv2d.default
NAMES = ("input", "weight", "bias")


@dataclass(frozen=True)
class Convolution(Pass):
    """Replaces ``conv2d`` with ``conv2d_low`` when its weight trains and ``what_pays`` says so.

    Law: two dimensions, one group, no dilation, channels_last images. Exactness: forward and the gradients of input
    and bias bit-exact; the weight's gradient rounding-equal, with the kernel's fp32 sums in another order.
    """

    name: ClassVar[str] = "convolution"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution that trains."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            if not _trains(node):
                continue
            given = facts.schema_arguments(CONV2D, node.args, dict(node.kwargs))
            reason = _why_not(node, given)
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            node.op, node.target, node.kwargs = "call_function", conv2d_low, {}
            node.args = (
                given["input"],
                given["weight"],
                given["bias"],
                _pair(given["stride"]),
                _pair(given["padding"]),
            )
            changes.append(Change(self.name, "weight's gradient", node.name, "a product is faster over so few places"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _trains(node: Node) -> bool:
    if node.op != "call_function" or node.target is conv2d_low or REGION in node.meta:
        return False
    return names_of(node) == ("aten.conv2d",) and is_trained(node)


def _why_not(node: Node, given: dict[str, Any]) -> str:
    """Return why a call stays as it is, "" where it does not."""
    if isinstance(given["padding"], str) or given["groups"] != 1 or _pair(given["dilation"]) != (1, 1):
        return "it has groups, dilation or named padding"
    if not isinstance(given["weight"], Node) or not is_trained(given["weight"]):
        return "its weight has no gradient"
    x, weight, out = value(given["input"]), value(given["weight"]), value(node)
    if not isinstance(x, torch.Tensor) or not (is_channels_last(x) or not is_image(x)):
        return "its images are not channels_last"
    places = concrete_size(out.shape[2]) * concrete_size(out.shape[3])
    kernel, channels = concrete_size(weight.shape[2]) * concrete_size(weight.shape[3]), concrete_size(x.shape[1])
    if not weight_gradient_by_product_pays(
        x.device.type, x.dtype, channels, kernel, _pair(given["stride"]) != (1, 1), places
    ):
        return f"the kernel is as fast for {channels} channels and {places} places in {x.dtype} on {x.device.type}"
    return ""


def _pair(given: Any) -> tuple[Any, Any]:
    found = (given,) if isinstance(given, int) else tuple(given)
    return found * 2 if len(found) == 1 else found

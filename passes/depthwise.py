"""Give depthwise convolutions gradients by compiled C, where the kernel's own are loops.

Before: ``conv2d(x, w, b, 1, 3, 1, groups)`` with 7 x 7 places, in bf16 on CPU. After: ``depthwise_low(x, w, b, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.convolution_backward import depthwise_low
from amp_graph.passes.convolution_call import ConvolutionCall, calls_convolution, depthwise_call
from amp_graph.passes.depthwise_ops import library
from amp_graph.passes.image_layout import is_channels_last
from amp_graph.passes.native_code import CompilerError
from amp_graph.passes.regions import is_trained
from amp_graph.passes.what_pays import depthwise_input_gradient_pays, depthwise_weight_gradient_pays


@dataclass(frozen=True)
class Depthwise(Pass):
    """Replaces ``conv2d`` of as many groups as channels with ``depthwise_low`` when ``what_pays`` says so.

    Law: as many channels in the result, no dilation, channels_last images. Exactness: forward bit-exact; gradients
    rounding-equal, with fp32 sums in another order.
    """

    name: ClassVar[str] = "depthwise"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every depthwise convolution that trains."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            call = depthwise_call(node) if calls_convolution(node) and is_trained(node) else ""
            if isinstance(call, str):
                continue
            weight, images = _pays(call)
            reason = _why_not(call) if weight or images else "the kernel has gradients of its own for this form"
            if reason:
                skips.append(Skip(node.name, reason))
                continue
            node.target, node.kwargs = depthwise_low, {}
            node.args = (call.input, call.weight, call.bias, call.stride, call.padding, weight, images)
            what = " and ".join(["weight's gradient"] * weight + ["input's gradient"] * images)
            changes.append(Change(self.name, what, node.name, "by compiled C, where the kernel has a loop"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _pays(call: ConvolutionCall) -> tuple[bool, bool]:
    """Say whether the gradients of weight and of input are better ours."""
    x, wanted = call.image, is_trained(call.input)
    weight = call.trains and depthwise_weight_gradient_pays(x.device.type, x.dtype, call.kernel)
    return weight, wanted and depthwise_input_gradient_pays(x.device.type, x.dtype, call.stride)


def _why_not(call: ConvolutionCall) -> str:
    """Return why a call stays as it is, "" where it does not."""
    if not is_channels_last(call.image):
        return "its images are not channels_last"
    try:
        library(call.image.dtype)
    except CompilerError as error:
        return str(error).partition("\n")[0]
    return ""

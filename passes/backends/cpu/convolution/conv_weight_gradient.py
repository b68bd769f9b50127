"""Compute the weight gradient of convolutions of small images as one matmul, where the kernel's own is slower.

Before: ``conv2d(x, w, None, 2, 1)`` in bf16 on CPU.
After: ``conv2d_low(x, w, None, (2, 2), (1, 1))``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.passes.backends.cpu.convolution.conv_functions import conv2d_low
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.layout.conv_args import ONE, ConvolutionCall, calls_convolution, convolution_call
from amp_graph.passes.layout.memory_format import is_channels_last, is_image
from amp_graph.passes.profitability.call_thresholds import weight_gradient_function_is_profitable
from amp_graph.passes.profitability.conv_thresholds import weight_gradient_by_product_is_profitable
from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class Convolution(Pass):
    """Replaces ``conv2d`` with ``conv2d_low`` when its weight trains and this is profitable.

    Law: two dimensions, one group, no dilation, channels_last images. Exactness: forward and the gradients of input and
    bias bit-exact; the weight's gradient rounding-equal, with the kernel's fp32 sums in another order.
    """

    name: ClassVar[str] = "convolution"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution that trains."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            if not calls_convolution(node) or not is_trained(node):
                continue
            call = convolution_call(node)
            reason = call if isinstance(call, str) else _why_not(call)
            if isinstance(call, str) or reason:
                skips.append(Skip(node.name, reason))
                continue
            node.target, node.kwargs = conv2d_low, {}
            node.args = (call.input, call.weight, call.bias, call.stride, call.padding)
            changes.append(Change(self.name, "weight's gradient", node.name, "a matmul is faster over so few places"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _why_not(call: ConvolutionCall) -> str:
    """Return why a call stays as it is, or ""."""
    if not call.trains:
        return "its weight has no gradient"
    x, channels, places = call.image, call.channels, call.places
    if is_image(x) and not is_channels_last(x):
        return "its images are not channels_last"
    kernel, strided = math.prod(call.kernel), call.stride != ONE
    if not weight_gradient_by_product_is_profitable(x.device.type, x.dtype, channels, kernel, strided, places):
        return f"the kernel is as fast for {channels} channels and {places} places in {x.dtype} on {x.device.type}"
    products = concrete_size(x.shape[0]) * places * concrete_size(value(call.weight).numel())
    if not weight_gradient_function_is_profitable(products):
        return f"the call of a function of ours takes longer than {products} multiplications"
    return ""

"""Lower convolutions with a 1 x 1 kernel to matmuls, where those are faster.

Before: ``conv2d(x, w)``, ``w`` [out, in, 1, 1], on channels_last images.
After: ``pointwise_conv(x, w)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule

from amp_graph.passes.backends.cpu.convolution.pointwise_conv_functions import pointwise_conv
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.call_arguments import has_norm
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.layout.conv_args import ONE, ConvolutionCall, calls_convolution, convolution_call
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class LowerPointwiseConv(Pass):
    """Replaces ``conv2d(x, w)`` with ``pointwise_conv(x, w)`` when ``w`` is 1 x 1 and this is profitable.

    Law: no padding, dilation or groups, any stride, and ``x`` channels_last, so that its places are rows in memory.
    Exactness: rounding-equal; sums are fp32 in another order.
    """

    options: PipelineOptions
    name: ClassVar[str] = "lower-pointwise-conv"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            call = convolution_call(node) if calls_convolution(node) else ""
            if isinstance(call, str) or not _is_product(call):
                continue
            if self.options.folds_norms and has_norm(node):
                skips.append(Skip(node.name, "the batch norm behind it is folded into it"))
                continue
            out = value(node)
            places = concrete_size(out.shape[0]) * call.places
            if not pointwise_product_is_profitable(out.device.type, out.dtype, places, call.trains):
                skips.append(Skip(node.name, f"torch's is as fast for {places} places in {out.dtype}"))
                continue
            few = places <= FEW_PLACES
            node.target, node.kwargs = pointwise_conv, {}
            node.args = (call.input, call.weight, call.bias, call.stride, few)
            what = "a matmul forward and backward" if few else "a matmul for the weight's gradient"
            changes.append(Change(self.name, "as a matmul", node.name, f"{places} places: {what}"))
        return PassResult(gm, tuple(changes), tuple(skips))


def _is_product(call: ConvolutionCall) -> bool:
    return call.kernel == ONE and not any(call.padding) and call.lies_in_rows


# Pixels of the whole batch up to which the weight reordering of a 1x1 convolution makes it slower than a matmul.
FEW_PLACES = 512


def pointwise_product_is_profitable(device: str, dtype: torch.dtype, places: int, trains: bool) -> bool:
    """Say whether a 1x1 convolution of channels_last images is faster as a matmul, in forward or in a gradient.

    ``places``: pixels of the batch. Speedups, bf16 on CPU with dot products, ResNet-50's shapes, also stride 2 (which
    copies its input): weight gradient 0.96 to 1.3 from 1,500 pixels on, 1.2 to 2.8 below; forward and input gradient
    1.07 to 1.6 at 200 to 400 pixels, 0.94 to 1.13 above, where they stay convolutions. With AMX all three took 0.55 to
    0.60 of the time at 784 pixels, and 0.77 (weight) to 1.02 at 12,544.
    """
    fits = device == "cpu" and dtype == torch.bfloat16 and multiplies_bf16()
    return fits and (trains or places <= FEW_PLACES)

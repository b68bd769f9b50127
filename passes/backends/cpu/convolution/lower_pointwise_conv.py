"""Lower convolutions with a 1 x 1 kernel to matmuls, where those are faster.

Before: ``conv2d(x, w)``, ``w`` [out, in, 1, 1], on channels_last images.
After: ``pointwise_conv(x, w)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from amp_graph.passes.backends.cpu.convolution.pointwise_conv_functions import pointwise_conv
from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.layout.conv_args import ONE, ConvolutionCall, calls_convolution, convolution_call
from amp_graph.passes.op_args.batch_norm_args import has_norm
from amp_graph.passes.profitability.conv_thresholds import FEW_PLACES, pointwise_product_is_profitable
from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class LowerPointwiseConv(Pass):
    """Replaces ``conv2d(x, w)`` with ``pointwise_conv(x, w)`` when ``w`` is 1 x 1 and this is profitable.

    Law: no padding, dilation or groups, any stride, and ``x`` channels_last, so that its places are rows in memory.
    Exactness: rounding-equal; sums are fp32 in another order.

    ``folds``: whether batch norms in evaluation will be folded into the convolutions before them, which saves more.
    """

    folds: bool = False
    name: ClassVar[str] = "lower-pointwise-conv"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution."""
        changes, skips = [], []
        for node in gm.graph.nodes:
            call = convolution_call(node) if calls_convolution(node) else ""
            if isinstance(call, str) or not _is_product(call):
                continue
            if self.folds and has_norm(node):
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

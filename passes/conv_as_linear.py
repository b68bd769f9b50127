"""Let convolutions whose kernel covers the whole image be linears: each result is one sum over all of it.

Before: ``conv2d(x, w, b)``, ``x`` [batch, in, 7, 7] and ``w`` [out, in, 7, 7], as in VGG's classifier.
After: ``linear(x.flatten(1), w.flatten(1), b).view(-1, out, 1, 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.convolution_call import ONE, ConvolutionCall, calls_convolution, convolution_call
from amp_graph.passes.formulas import describe
from amp_graph.passes.image_layout import is_channels_last
from amp_graph.passes.node_value import fake_mode_of, value
from amp_graph.passes.pointwise_conv import has_norm
from amp_graph.passes.torch_private import FakeTensorMode


@dataclass(frozen=True)
class ConvAsLinear(Pass):
    """Replaces ``conv2d(x, w, b)`` with ``linear`` when ``w`` is as high and wide as ``x``.

    Law: no padding, dilation or groups; more than one place, which ``PointwiseConv`` takes. Exactness: rounding-equal,
    sums in another order. The kernels of convolutions lay out such weights, which are large, anew in every call, and
    their gradients too; a linear reads them as they lie.

    ``folds``: whether batch norms in evaluation will be folded into the convolutions before them, which is worth more.
    """

    folds: bool = False
    name: ClassVar[str] = "conv-as-linear"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every convolution."""
        mode, changes = fake_mode_of(gm), []
        for node in list(gm.graph.nodes):
            call = convolution_call(node) if calls_convolution(node) else ""
            if mode is None or isinstance(call, str) or not _covers_the_image(call) or (self.folds and has_norm(node)):
                continue
            made = _as_linear(gm, call, mode)
            changes.append(Change(self.name, "as a linear", made.name, f"its kernel covers images of {call.kernel}"))
        return PassResult(gm, tuple(changes))


def _covers_the_image(call: ConvolutionCall) -> bool:
    """Say whether there is one place to compute, whatever the sizes that vary will be."""
    height, width = call.image.shape[2:]
    fixed = type(height) is int and type(width) is int
    return fixed and (height, width) == call.kernel != ONE and not any(call.padding)


def _as_linear(gm: GraphModule, call: ConvolutionCall, mode: FakeTensorMode) -> Node:
    """Put the linear in the place of the convolution; return its result as an image of one place."""
    node, graph = call.node, gm.graph
    channels_last = is_channels_last(value(call.weight))

    def rows(source: Node) -> Node:
        if channels_last:  # in the order in which the weight lies: a view
            source = describe(graph.call_method("permute", (source, (0, 2, 3, 1))), node, mode)
        return describe(graph.call_method("flatten", (source, 1)), node, mode)

    with graph.inserting_before(node):
        given = (rows(call.input), rows(call.weight), call.bias)
        product = describe(graph.call_function(F.linear, given), node, mode)
        made = describe(graph.call_method("view", (product, -1, value(call.weight).shape[0], 1, 1)), node, mode)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made

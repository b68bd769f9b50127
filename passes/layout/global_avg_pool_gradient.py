"""Return the gradient of an average over whole images as an expanded view, without writing it for each pixel.

Before: ``adaptive_avg_pool2d(x, 1)`` or ``mean((2, 3))`` of channels_last images. After: ``pooled(x, keepdim, dtype)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.memory_format import averages_places, is_channels_last
from amp_graph.passes.torch_compat.autograd import leaves_to_torch
from amp_graph.passes.torch_compat.fake import FakeTensorMode


@dataclass(frozen=True)
class GlobalAvgPoolGradient(NodePass):
    """Replaces ``adaptive_avg_pool2d`` to 1x1, and ``mean`` over all pixels, with ``pooled`` where they have gradients.

    Law: channels_last images, outside of regions whose precision the user set. Exactness: bit-exact. Torch's gradient
    is a contiguous image: a sum with it (as in squeeze and excitation) mixes two layouts, and later backward kernels
    are slow on the result. It is also written for each pixel, after two calls that undo the layout of the average.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Replace an average with a gradient."""
        if node.target is pooled or not is_trained(node) or not averages_places(node):
            return None
        (x,) = node.all_input_nodes
        if not is_channels_last(value(x)):
            return None
        node.op, node.target, node.kwargs = "call_function", pooled, {}
        node.args = (x, value(node).dim() == 4, value(node).dtype)
        return Change(self.name, "gradient of an average", node.name, "the same for each pixel")


def pooled(x: Tensor, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Return ``x.mean((2, 3), keepdim, dtype=dtype)`` of images [batch, channels, height, width].

    Its gradient is an expanded view of one number per channel, rounded to the dtype of ``x``.
    """
    trains = torch.is_grad_enabled() and x.requires_grad
    if not trains or leaves_to_torch(x):
        return _average(x, keepdim, dtype)
    return _Pooled.apply(x, keepdim, dtype)


def _average(x: Tensor, keepdim: bool, dtype: torch.dtype) -> Tensor:
    if keepdim and dtype == x.dtype:  # same values, but keeps the layout of the images
        return F.adaptive_avg_pool2d(x, 1)
    return x.mean((2, 3), keepdim, dtype=dtype)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keepdim: bool, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype, ctx.keepdim = x.shape, x.dtype, keepdim
        return _average(x, keepdim, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        share = (grad / (ctx.shape[2] * ctx.shape[3])).to(ctx.dtype)
        return (share if ctx.keepdim else share[:, :, None, None]).expand(ctx.shape), None, None

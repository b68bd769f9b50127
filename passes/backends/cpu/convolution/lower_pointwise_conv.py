"""Lower convolutions with a 1 x 1 kernel to matmuls, where those are faster.

Before: ``conv2d(x, w)``, ``w`` [out, in, 1, 1], on channels_last images.
After: ``pointwise_conv(x, w)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear
from amp_graph.passes.base import Change, Skip
from amp_graph.passes.graph.call_arguments import has_norm
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.layout.conv_args import ONE, convolution_call
from amp_graph.passes.pipeline_options import PipelineOptions
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.devices import multiplies_bf16
from amp_graph.passes.torch_compat.fake import FakeTensorMode, concrete_size

own_functions(__name__)


def pointwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], few: bool) -> Tensor:
    """Return ``F.conv2d(x, weight, bias, stride)`` for a ``weight`` [out, in, 1, 1] and channels_last ``x``.

    The weight's gradient is a matmul; with ``few`` places, the result and the gradient of ``x`` are, too. All sums are
    fp32, rounded once. Source: aten/src/ATen/native/mkldnn/Conv.cpp.
    """
    if leaves_to_torch(x, weight):
        return F.conv2d(x, weight, bias, stride)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, stride, few)
    return _PointwiseConv.apply(x, weight, bias, stride, few)


class _PointwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], few: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.few = stride, few
        # Not a view: views returned by a function with its own backward may not be written in place (relu_).
        return _forward(x, weight, bias, stride, few).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dweight = None
        dbias = grad.sum((0, 2, 3)) if of_bias else None
        if is_plain(grad):
            again = lambda x, w: F.conv2d(x, w, None, ctx.stride)  # noqa: E731
            return *gradients_by_torch(again, (x, weight), (of_x, of_weight), (grad,)), dbias, None, None
        if of_x and ctx.few:
            dx = _spread(grad, weight, x, ctx.stride)
        elif of_x:
            geometry = (list(ctx.stride), [0, 0], [1, 1], False, [0, 0], 1)
            dx = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [True, False, False])[0]
        if of_weight:
            read = x if ctx.stride == (1, 1) else x[:, :, :: ctx.stride[0], :: ctx.stride[1]]
            dweight = gradients_of_linear(rows(grad), rows(read), biased=False)[0].view(weight.shape)
        return dx, dweight, dbias, None, None


def rows(image: Tensor) -> Tensor:
    """Return an image [batch, channels, height, width] as [places, channels]; a view where it is channels_last."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], few: bool) -> Tensor:
    if not few:
        return F.conv2d(x, weight, bias, stride)
    x = _read(x, stride)
    return _image(F.linear(rows(x), weight.flatten(1), bias), x)


def _spread(grad: Tensor, weight: Tensor, x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the gradient of ``x``: a matmul at the places that were read, zero at the others."""
    found = _image(rows(grad) @ weight.flatten(1), grad)
    if stride == (1, 1):
        return found
    whole = torch.zeros_like(x, memory_format=torch.channels_last)
    whole[:, :, :: stride[0], :: stride[1]] = found
    return whole


def _read(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the part of ``x`` that the kernel reads, one place per row."""
    if stride == (1, 1):
        return x
    return x[:, :, :: stride[0], :: stride[1]].contiguous(memory_format=torch.channels_last)


def _image(found: Tensor, like: Tensor) -> Tensor:
    """Return rows as a channels_last image with the batch, height and width of ``like``."""
    batch, _, height, width = like.shape
    return found.view(batch, height, width, found.shape[1]).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class LowerPointwiseConv(NodePass):
    """Replaces ``conv2d(x, w)`` with ``pointwise_conv(x, w)`` when ``w`` is 1 x 1 and this is profitable.

    Law: no padding, dilation or groups, any stride, and ``x`` channels_last, so that its places are rows in memory.
    Exactness: rounding-equal; sums are fp32 in another order.
    """

    options: PipelineOptions

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Replace a convolution."""
        call = convolution_call(node)
        if call is None or call.groups != 1 or call.kernel != ONE or any(call.padding) or not call.lies_in_rows:
            return None
        if self.options.folds_norms and has_norm(node):
            return Skip(node.name, "the batch norm behind it is folded into it")
        out = value(node)
        places = math.prod(concrete_size(n) for n in (out.shape[0], *out.shape[2:]))
        trains = is_trained(node) and is_trained(call.weight)
        if not pointwise_product_is_profitable(out.device.type, out.dtype, places, trains):
            return Skip(node.name, f"torch's is as fast for {places} places in {out.dtype}")
        few = places <= FEW_PLACES
        node.target, node.kwargs = pointwise_conv, {}
        node.args = (call.input, call.weight, call.bias, call.stride, few)
        what = "a matmul forward and backward" if few else "a matmul for the weight's gradient"
        return Change(self.name, "as a matmul", node.name, f"{places} places: {what}")


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

"""A convolution with a 1 x 1 kernel, computed as a matmul.

Before: ``conv2d(x, w)`` with ``w`` [out, in, 1, 1].
After: ``rows(x) @ w.t()``, where ``rows`` [places, in] is a view of a channels_last ``x``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch

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
        dx = dweight = dbias = None
        if is_plain(grad):
            again = lambda x, w: F.conv2d(x, w, None, ctx.stride)  # noqa: E731
            dx, dweight = gradients_by_torch(again, (x, weight), (of_x, of_weight), (grad,))
            return dx, dweight, grad.sum((0, 2, 3)) if of_bias else None, None, None
        if of_x:
            dx = _spread(grad, weight, x, ctx.stride) if ctx.few else _torchs(grad, weight, x, ctx.stride)
        if of_weight:
            read = x if ctx.stride == (1, 1) else x[:, :, :: ctx.stride[0], :: ctx.stride[1]]
            dweight = gradients_of_linear(rows(grad), rows(read), biased=False)[0].view(weight.shape)
        if of_bias:
            dbias = grad.sum((0, 2, 3))
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


def _torchs(grad: Tensor, weight: Tensor, x: Tensor, stride: tuple[int, int]) -> Tensor:
    geometry = (list(stride), [0, 0], [1, 1], False, [0, 0], 1)
    found: Tensor = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [True, False, False])[0]
    return found


def _read(x: Tensor, stride: tuple[int, int]) -> Tensor:
    """Return the part of ``x`` that the kernel reads, one place per row."""
    if stride == (1, 1):
        return x
    return x[:, :, :: stride[0], :: stride[1]].contiguous(memory_format=torch.channels_last)


def _image(found: Tensor, like: Tensor) -> Tensor:
    """Return rows as a channels_last image with the batch, height and width of ``like``."""
    batch, _, height, width = like.shape
    return found.view(batch, height, width, found.shape[1]).permute(0, 3, 1, 2)

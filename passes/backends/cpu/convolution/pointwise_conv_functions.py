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


def pointwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, few: bool) -> Tensor:
    """Return ``F.conv2d(x, weight, bias)`` for a ``weight`` [out, in, 1, 1] and channels_last ``x``.

    The weight's gradient is a matmul; with ``few`` places, the result and the gradient of ``x`` are, too. All sums are
    fp32, rounded once. Source: aten/src/ATen/native/mkldnn/Conv.cpp.
    """
    if leaves_to_torch(x, weight):
        return F.conv2d(x, weight, bias)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, few)
    return _PointwiseConv.apply(x, weight, bias, few)


class _PointwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, few: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.few = few
        # Not a view: views returned by a function with its own backward may not be written in place (relu_).
        return _forward(x, weight, bias, few).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dweight = None
        if is_plain(grad):
            dx, dweight = gradients_by_torch(F.conv2d, (x, weight), (of_x, of_weight), (grad,))
        else:
            if of_x:
                dx = _image(rows(grad) @ weight.flatten(1), grad) if ctx.few else _torchs(grad, weight, x)
            if of_weight:
                dweight = gradients_of_linear(rows(grad), rows(x), biased=False)[0].view(weight.shape)
        return dx, dweight, grad.sum((0, 2, 3)) if of_bias else None, None


def rows(image: Tensor) -> Tensor:
    """Return an image [batch, channels, height, width] as [places, channels]; a view where it is channels_last."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, few: bool) -> Tensor:
    return _image(F.linear(rows(x), weight.flatten(1), bias), x) if few else F.conv2d(x, weight, bias)


def _torchs(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found: Tensor = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, [True, False, False])[0]
    return found


def _image(found: Tensor, like: Tensor) -> Tensor:
    """Return rows as a channels_last image with the batch, height and width of ``like``."""
    batch, _, height, width = like.shape
    return found.view(batch, height, width, found.shape[1]).permute(0, 3, 1, 2)

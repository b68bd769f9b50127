"""Convolutions in training for converted graphs, where the CPU kernel is slow for one of the gradients.

Before: ``conv2d(x, w)``, whose kernel iterates over the few places of a small image to sum the gradient of ``w``; and
``conv_transpose2d(x, w, b)``, whose kernel sums that of ``b`` element by element.
After: the same forwards. The backward of ``conv2d_low(x, w)`` multiplies the patches, one per row, with the gradient
(im2col: Chellapilla et al., "High Performance Convolutional Neural Networks for Document Processing", 2006).
``conv_transpose_low(x, w, b)`` sums the gradient by torch's own ``sum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.convolution.depthwise_kernel import OPS
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import takes_fp32
from amp_graph.passes.torch_compat.double_backward import gradients_by_torch, is_plain, leaves_to_torch

own_functions(__name__)


def conv2d_low(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """``F.conv2d`` without dilation and groups, whose weight's gradient is a matrix product.

    x: [batch, channels, height, width]; weight: [out, channels, kernel height, kernel width], of one dtype. Forward and
    the gradients of ``x`` and ``bias`` are torch's own. The weight's gradient is summed in fp32 inside of the product,
    rounded once, and lies in channels_last, as the kernel's does for such images.
    """
    trains = torch.is_grad_enabled() and weight.requires_grad
    if not trains or leaves_to_torch(x, weight) or x.dim() != 4:
        return F.conv2d(x, weight, bias, stride, padding)
    return _Conv2d.apply(x, weight, bias, tuple(stride), tuple(padding))


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        if is_plain(grad):
            again = lambda x, w, b: F.conv2d(x, w, b, ctx.stride, ctx.padding)  # noqa: E731
            return *gradients_by_torch(again, (x, weight, bias), need, (grad,)), None, None
        dx = dbias = None
        if need[0] or need[2]:
            sizes = None if bias is None else list(bias.shape)
            how = (ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1)
            kernel = torch.ops.aten.convolution_backward
            dx, _, dbias = kernel(grad, x, weight, sizes, *how, [need[0], False, need[2]])
        dweight = None
        if need[1]:
            dweight = weight_gradient(grad, x, weight, ctx.stride, ctx.padding, takes_fp32(ctx, 1))
        return dx, dweight, dbias, None, None


def conv_transpose_low(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    """``F.conv_transpose2d``, 1d or 3d, whose bias' gradient is one sum over batch and places.

    x: [batch, channels, *places]; weight: [channels, out / groups, *kernel]; bias: [out], of one dtype; a number for
    each dimension of the places. Forward and the gradients of ``x`` and ``weight`` are torch's own. The bias' gradient
    is summed in fp32 and rounded once, as the kernel's is: oneDNN has no other than the reference's, a loop (its
    src/cpu/ref_deconvolution.cpp).
    """
    how = (tuple(stride), tuple(padding), tuple(dilation), True, tuple(output_padding), groups)
    trains = torch.is_grad_enabled() and bias.requires_grad
    if not trains or leaves_to_torch(x, weight, bias):
        return torch.convolution(x, weight, bias, *how)
    return _ConvTranspose.apply(x, weight, bias, how)


class _ConvTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how = how
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        if is_plain(grad):
            again = lambda x, w, b: torch.convolution(x, w, b, *ctx.how)  # noqa: E731
            return *gradients_by_torch(again, (x, weight, bias), need, (grad,)), None
        dx = dweight = None
        if need[0] or need[1]:
            kernel = torch.ops.aten.convolution_backward
            dx, dweight, _ = kernel(grad, x, weight, None, *ctx.how, [need[0], need[1], False])
        dbias = grad.sum((0, *range(2, grad.dim()))) if need[2] else None
        return dx, dweight, dbias, None


def depthwise_low(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    own_weight: bool,
    own_input: bool,
) -> Tensor:
    """``F.conv2d`` with a group for each channel, with parts of its backward in compiled C.

    x: [batch, channels, height, width], channels_last; weight: [channels, 1, kernel height, kernel width], of one
    dtype, bf16 or fp16. Forward is torch's own. ``own_weight``: the gradients of weight and bias are ours;
    ``own_input``: so is that of ``x``. Sums are fp32, rounded once.
    """
    how = (tuple(stride), tuple(padding), (1, 1), False, (0, 0), x.shape[1])
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not trains or leaves_to_torch(x, weight):
        return torch.convolution(x, weight, bias, *how)
    return _Depthwise.apply(x, weight, bias, how, own_weight, own_input)


def depthwise_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    own_weight: bool,
    own_input: bool,
) -> Tensor:
    """``F.conv1d`` with a group for each channel, as ``depthwise_low`` of images one place high.

    x: [batch, channels, length]; weight: [channels, 1, kernel]; the result is contiguous, as torch's.
    """
    if leaves_to_torch(x, weight, bias):
        return F.conv1d(x, weight, bias, stride, padding, groups=x.shape[1])
    image = x[:, :, None].contiguous(memory_format=torch.channels_last)
    how = (1, *stride), (0, *padding)
    return depthwise_low(image, weight[:, :, None], bias, *how, own_weight, own_input)[:, :, 0].contiguous()


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...], weights: bool, inputs: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how, ctx.own = how, (inputs, weights, weights)
        return torch.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        if is_plain(grad):
            again = lambda x, w, b: torch.convolution(x, w, b, *ctx.how)  # noqa: E731
            return *gradients_by_torch(again, (x, weight, bias), need, (grad,)), None, None, None
        stride, padding = map(list, ctx.how[:2])
        found: list[Tensor | None] = [None] * 3
        torchs = [needed and not own for needed, own in zip(need, ctx.own, strict=True)]
        if any(torchs):
            sizes = None if bias is None else list(bias.shape)
            found = list(torch.ops.aten.convolution_backward(grad, x, weight, sizes, *ctx.how, torchs))
        if need[0] and not torchs[0]:
            found[0] = OPS.depthwise_input_gradient(grad, weight, x.shape, stride, padding)
        if need[1] and not torchs[1]:
            found[1] = OPS.depthwise_weight_gradient(grad, x, weight.shape[2:], stride, padding)
        if need[2] and not torchs[2]:
            found[2] = grad.sum((0, 2, 3))
        return *found, None, None, None


def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], wide: bool
) -> Tensor:
    """Return the gradient of ``weight``, of its shape: patches of ``x`` times ``grad``, summed over all places.

    In the dtype of ``weight``; or, if ``wide``, cast to fp32 where that is free.
    """
    out, channels, height, width = weight.shape
    product, _ = gradients_of_linear(rows(grad), _patches(x, (height, width), stride, padding), False, wide)
    return product.view(out, height, width, channels).permute(0, 3, 1, 2)


def rows(image: Tensor) -> Tensor:
    """Return an image [batch, channels, height, width] as [places, channels]; a view where it is channels_last."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def _patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Return the kernel's input at each place, one per row: [batch * places, kernel * channels]."""
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    if tuple(kernel) == (1, 1):
        return rows(x if tuple(stride) == (1, 1) else x[:, :, :: stride[0], :: stride[1]])
    patches = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    return patches.permute(0, 2, 3, 4, 5, 1).reshape(-1, kernel[0] * kernel[1] * x.shape[1])

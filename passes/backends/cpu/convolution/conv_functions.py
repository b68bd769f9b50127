"""Depthwise convolutions in training for converted graphs, parts of whose backward are compiled C.

Before: ``conv2d(x, w, groups=channels)``, whose bf16 kernel is a plain loop for some gradients.
After: ``depthwise_low(x, w, ...)``, with the same forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load, threads_for
from amp_graph.passes.native.kernel_table import NUMBER, STRUCT, kernel, run
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_as_typed
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch

SOURCE = Path(__file__).with_name("depthwise_kernel.c")
LAST = torch.channels_last

FUNCTIONS = {"weight_gradient": (STRUCT, NUMBER), "input_gradient": (STRUCT, NUMBER)}
# The library for bf16 or fp16. Raises CompilerError if it cannot be compiled.
library = kernel("depthwise_conv", lambda low: load(SOURCE, MACROS[low]), FUNCTIONS)


def depthwise_weight_gradient(
    grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Return the gradient [channels, 1, *kernel] of a depthwise convolution's weight, in the dtype of ``x``.

    x: bf16 or fp16 [images, channels, height, width]; grad: of the result, as many channels; both taken as
    channels_last. Sums are fp32, rounded once.
    """
    x, grad = x.contiguous(memory_format=LAST), grad.contiguous(memory_format=LAST)
    sums = torch.empty((kernel[0] * kernel[1], x.shape[1]), dtype=torch.float32)
    table = _table(x.shape, grad, kernel, stride, padding, x=x, weight=sums)
    run(library(x.dtype).weight_gradient, "depthwise convolution", table, threads_for(x.numel()))
    return sums.t().to(x.dtype, memory_format=torch.contiguous_format).view(-1, 1, *kernel)


def depthwise_input_gradient(
    grad: Tensor, weight: Tensor, size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Return the gradient of a depthwise convolution's input, of ``size`` and the dtype of ``grad``, channels_last.

    weight: [channels, 1, height, width]. Sums are fp32, rounded once.
    """
    grad = grad.contiguous(memory_format=LAST)
    dx = torch.empty(size, dtype=grad.dtype, memory_format=LAST)
    rows = weight.flatten(1).t().to(torch.float32, memory_format=torch.contiguous_format)
    table = _table(dx.shape, grad, weight.shape[2:], stride, padding, weight=rows, dx=dx)
    run(library(grad.dtype).input_gradient, "depthwise convolution", table, threads_for(dx.numel()))
    return dx


def _table(
    size: torch.Size,
    grad: Tensor,
    kernel: list[int] | torch.Size,
    stride: list[int],
    padding: list[int],
    *,
    weight: Tensor,
    x: Tensor | None = None,
    dx: Tensor | None = None,
) -> list[Tensor | int | None]:
    """Return the C struct Depthwise."""
    return [*size, *grad.shape[2:], *kernel, *stride, *padding, x, grad, weight, dx, 0]


define_as_typed(depthwise_weight_gradient, lambda x, kernel: x.new_empty((x.shape[1], 1, *kernel)))
define_as_typed(
    depthwise_input_gradient,
    lambda grad, size: torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=LAST),
)


own_functions(__name__)


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

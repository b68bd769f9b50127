"""Compute one-dimensional convolutions as matmuls of their windows, which overlap in memory.

Before: ``conv1d(x, w, b, stride=2)`` in bf16 on CPU: a convolution of images one place high, in the layout that torch
infers.
After: ``conv1d_by_windows(x, w, b, 2, 0)``: with channels last, a window is a row of a matrix, and so is the result,
which the next convolution reads without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.convolution.depthwise_conv_gradients import CALLS, SEQUENCES
from amp_graph.passes.backends.cpu.convolution.transpose_kernel import turned
from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear
from amp_graph.passes.backends.cpu.linear.linear_functions import multiplied, multiply_into
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION, TRANSFORM
from amp_graph.passes.profitability.conv_thresholds import windows_are_profitable
from amp_graph.passes.registry import declare
from amp_graph.passes.torch_compat.autograd import takes_fp32
from amp_graph.passes.torch_compat.dispatch import is_recorded
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.fake import concrete_size

FEW = 1 << 20  # elements in the windows of one item


@dataclass(frozen=True)
class Conv1d(Pass):
    """Replaces ``conv1d`` with matmuls of windows, when it is profitable.

    Law: x: [batch, channels, length], one group, no dilation, symmetric zero padding. Exactness: rounding-equal, fp32
    sums in another order, rounded once. The result is channels-last.
    """

    name: ClassVar[str] = "conv1d"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every one-dimensional convolution."""
        changes = []
        for node in gm.graph.nodes:
            given = _given(node)
            if given is not None:
                node.target, node.args, node.kwargs = conv1d_by_windows, given, {}
                changes.append(Change(self.name, "as products", node.name, "windows are rows that overlap"))
        return PassResult(gm, tuple(changes))


def _given(node: Node) -> tuple[Any, ...] | None:
    """Return the arguments of ``conv1d_by_windows``; None if ``node`` stays."""
    if node.target not in CALLS or names_of(node) != ("aten.conv1d",):
        return None
    if not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return None
    given = node_info.schema_arguments(SEQUENCES, node.args, dict(node.kwargs))
    stride, padding, dilation = (_alone(given[name]) for name in ("stride", "padding", "dilation"))
    x, weight, made = value(given["input"]), value(given["weight"]), value(node)
    if x.dim() != 3 or None in (stride, padding) or (dilation, given["groups"]) != (1, 1):
        return None
    if any(t.dtype != torch.bfloat16 for t in (x, weight, made)) or any(type(n) is not int for n in weight.shape):
        return None
    places = concrete_size(made.shape[0]) * concrete_size(made.shape[2])
    if not windows_are_profitable(x.device.type, x.dtype, places, weight.numel(), is_trained(node)):
        return None
    return given["input"], given["weight"], given["bias"], stride, padding, any(map(_goes_by_rows, node.users))


def _goes_by_rows(reader: Node) -> bool:
    """Say whether ``reader`` would make its input contiguous, with adjacent places of a channel."""
    return any(name.endswith("_norm") and name != "aten.layer_norm" for name in names_of(reader))


def _alone(sizes: Any) -> int | None:
    """Return an argument's single number for a sequence; None if it is a word."""
    if isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) == 1:
        (sizes,) = sizes
    return sizes if type(sizes) is int else None


def conv1d_by_windows(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, in_rows: bool
) -> Tensor:
    """``F.conv1d(x, weight, bias, stride, padding)`` of bf16 CPU tensors.

    x: [batch, channels, length]; weight: [outputs, channels, taps]; bias: [outputs] or None. ``in_rows``: the result is
    contiguous, otherwise channels-last. The gradient of ``x`` has the layout of ``x``.
    """
    if leaves_to_torch(x, weight, bias):
        return F.conv1d(x, weight, bias, stride, padding)
    found: Tensor = _Windows.apply(x, weight, bias, stride, padding, in_rows)
    return found if in_rows else found.transpose(1, 2)


declare(conv1d_by_windows, fp32_weight_gradient=True)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, in_rows: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = stride, padding, in_rows
        windows = _windows(_places(x, padding), weight.shape[2], stride)
        return _products(windows, _taps(weight).t(), in_rows, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, in_rows = ctx.call
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        grad = grad.transpose(1, 2) if in_rows else grad  # [batch, windows, outputs]
        if is_plain(grad):
            dx, dweight = _by_torch(grad, x, weight, stride, padding, (of_x, of_weight))
            return dx, dweight, grad.sum((0, 1)) if of_bias else None, None, None, None
        dx = dweight = dbias = None
        if of_x:
            lies_in_rows = not x.transpose(1, 2).is_contiguous()
            found = _gradient_of_places(grad.contiguous(), weight, stride, x.shape[2] + 2 * padding, lies_in_rows)
            dx = found.narrow(2, padding, x.shape[2])
        if of_weight:
            outputs, channels, taps = weight.shape
            windows = _windows(_places(x, padding), taps, stride)
            found, dbias = _of_weight(grad, windows, of_bias, takes_fp32(ctx, 1))
            dweight = found.view(outputs, taps, channels).transpose(1, 2)
        elif of_bias:
            dbias = grad.sum((0, 1))
        return dx, dweight, dbias, None, None, None


def _places(x: Tensor, padding: int) -> Tensor:
    """Return ``x`` [batch, channels, length] as contiguous [batch, padded length, channels]."""
    places = turned(x)
    return F.pad(places, (0, 0, padding, padding)) if padding else places


def _windows(places: Tensor, taps: int, stride: int) -> Tensor:
    """Return the windows of ``places`` [batch, length, channels]: [batch, windows, taps * channels], overlapping."""
    batch, length, channels = places.shape
    count, steps = (length - taps) // stride + 1, places.stride()
    return places.as_strided((batch, count, taps * channels), (steps[0], stride * steps[1], 1))


def _taps(weight: Tensor) -> Tensor:
    """Return ``weight`` [outputs, channels, taps] in the order of a window: [outputs, taps * channels]."""
    return weight.transpose(1, 2).flatten(1)


def _products(windows: Tensor, right: Tensor, in_rows: bool, bias: Tensor | None = None) -> Tensor:
    """Return ``windows @ right + bias``: [batch, windows, columns], or, ``in_rows``, [batch, columns, windows].

    The first by oneDNN, which copies overlapping windows; the second by compiled C, because oneDNN takes three times as
    long.
    """
    if in_rows:
        return _turned_products(windows, right.t(), bias)
    if is_recorded(right) or _are_few(windows):
        return F.linear(windows.flatten(0, 1), right.t(), bias).view(*windows.shape[:2], right.shape[1])
    together = right.new_empty((*windows.shape[:2], right.shape[1]))
    for one, into in zip(windows, together, strict=True):
        if bias is None:
            torch.mm(one, right, out=into)
        else:
            torch.addmm(bias, one, right, out=into)
    return together


def _are_few(windows: Tensor) -> bool:
    """Say whether to copy the windows of all items at once: larger copies would be mapped anew at each call."""
    return len(windows) <= 1 or windows.shape[1] * windows.shape[2] <= FEW


def _turned_products(windows: Tensor, left: Tensor, bias: Tensor | None) -> Tensor:
    if not len(windows):
        return left.new_empty((0, len(left), windows.shape[1]))
    if is_recorded(left):  # no in-place writes in a graph
        together = torch.stack([multiplied(left, one.t()) for one in windows])
        return together if bias is None else together + bias.unsqueeze(1)
    together = left.new_empty((len(windows), len(left), windows.shape[1]))
    for one, into in zip(windows, together, strict=True):
        multiply_into(into, left, one.t())
    return together if bias is None else together.add_(bias.unsqueeze(1))


def _of_weight(grad: Tensor, windows: Tensor, biased: bool, wide: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the taps [outputs, taps * channels], fp32 if ``wide``, and of the bias."""
    if is_recorded(grad) or _are_few(windows):
        return gradients_of_linear(grad.flatten(0, 1), windows.flatten(0, 1), biased, wide)
    total, *others = [gradients_of_linear(g, w, False, True)[0].float() for g, w in zip(grad, windows, strict=True)]
    for other in others:
        total.add_(other)
    return total if wide else total.to(grad.dtype), grad.sum((0, 1)) if biased else None


def _gradient_of_places(grad: Tensor, weight: Tensor, stride: int, length: int, in_rows: bool) -> Tensor:
    """Return the gradient of ``length`` places or a few more: [batch, channels, length].

    grad: [batch, windows, outputs]. The same taps read places that are ``stride`` apart: their gradients are matmuls of
    windows of ``grad``, with fp32 sums, rounded once.
    """
    (batch, count, _), channels, taps = grad.shape, weight.shape[1], weight.shape[2]
    most, rows = math.ceil(taps / stride), math.ceil(length / stride)  # windows that read a place; places per phase
    padded = F.pad(grad, (0, 0, most - 1, rows - count)) if most > 1 or rows > count else grad
    by_taps = weight.permute(2, 0, 1)  # [taps, outputs, channels]
    phases = []
    for phase in range(stride):
        read_by = by_taps[phase::stride].flip(0)
        if not len(read_by):
            phases.append(grad.new_zeros((batch, channels, rows) if in_rows else (batch, rows, channels)))
            continue
        windows = _windows(padded[:, most - len(read_by) :], len(read_by), 1)
        phases.append(_products(windows, read_by.reshape(-1, channels), in_rows))
    if in_rows:
        return torch.stack(phases, 3).flatten(2) if stride > 1 else phases[0]
    return (torch.stack(phases, 2).flatten(1, 2) if stride > 1 else phases[0]).transpose(1, 2)


def _by_torch(grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, needed: tuple[bool, bool]) -> Any:
    """Return the gradients of ``x`` and ``weight`` that are ``needed``, by operators with derivatives of their own."""
    kind = torch.ops.aten.convolution_backward
    mask = [*needed, False]
    return kind(grad.transpose(1, 2), x, weight, None, [stride], [padding], [1], False, [0], 1, mask)[:2]

"""Operators of a depthwise convolution's backward over compiled C, named in graphs.

Before: ``convolution_backward`` with as many groups as channels, a plain loop in oneDNN for some forms.
After: ``depthwise_weight_gradient``, and for strided convolutions ``depthwise_input_gradient``.
"""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load, threads_for
from amp_graph.passes.native.kernel_table import kernel
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_as_typed
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("depthwise_kernel.c")
LAST = torch.channels_last


@kernel("depthwise_conv")
def library(low: torch.dtype) -> ctypes.CDLL:
    """Return the library for ``low``, bf16 or fp16. Raises CompilerError if it cannot be compiled."""
    found = load(SOURCE, MACROS[low])
    found.weight_gradient.argtypes = found.input_gradient.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


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
    _run(library(x.dtype).weight_gradient, table, x.numel())
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
    _run(library(grad.dtype).input_gradient, table, dx.numel())
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
) -> array[int]:
    """Return the C struct Depthwise."""
    places = (0 if t is None else address_of(t) for t in (x, grad, weight, dx))
    return array("q", (*size, *grad.shape[2:], *kernel, *stride, *padding, *places, 0))


def _run(function: ctypes._NamedFuncPointer, table: array[int], elements: int) -> None:
    if function(table.buffer_info()[0], threads_for(elements)):
        raise MemoryError("depthwise convolution: no memory for a few rows")


def _fake_weight(grad: Tensor, x: Tensor, kernel: list[int]) -> Tensor:
    return x.new_empty((x.shape[1], 1, *kernel))


def _fake_input(grad: Tensor, size: list[int]) -> Tensor:
    return torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=LAST)


define_as_typed(depthwise_weight_gradient, _fake_weight)
define_as_typed(depthwise_input_gradient, _fake_input)

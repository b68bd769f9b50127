"""Operators of a batch norm in training with the following relu over compiled C, named in graphs.

Before: ``native_batch_norm`` and ``relu``, four passes over memory.
After: ``batch_norm_relu``, which reads its input twice, and in backward ``batch_norm_relu_backward``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load, threads_for
from amp_graph.passes.native.kernel_table import NUMBER, REAL, STRUCT, kernel, run
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_operator

SOURCE = Path(__file__).with_name("batch_norm_kernel.c")
LOW = 2  # what C calls low precision
LAST = torch.channels_last

# The library for bf16 or fp16. Raises CompilerError if it cannot be compiled.
library = kernel(
    "batch_norm",
    lambda low: load(SOURCE, MACROS[low]),
    {"forward": (STRUCT, REAL, REAL, NUMBER), "again": (STRUCT, NUMBER), "backward": (STRUCT, NUMBER)},
)


def batch_norm_relu(
    x: Tensor,
    other: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return the batch norm of ``x`` by its own statistics, plus ``other``, through a relu where asked; and these.

    x: bf16 or fp16 [images, channels, height, width], taken as channels_last, as is the result; other: of its shape and
    dtype, or None, and with a relu behind; weight, bias: fp32 [channels]; running statistics likewise, or None: they
    are written. Statistics returned: fp32 [2, channels], the mean and the reciprocal deviation. Rounded once.
    """
    x, other = x.contiguous(memory_format=LAST), None if other is None else other.contiguous(memory_format=LAST)
    stats, out = torch.empty((2, x.shape[1]), dtype=torch.float32), torch.empty_like(x)
    if not x.numel():
        return out, stats.zero_()
    table = _table(x, weight, bias, stats, out, relu, running_mean, running_var, other=other)
    run(library(x.dtype).forward, "batch_norm_relu", table, eps, momentum, threads_for(x.numel()))
    return out, stats


def batch_norm_relu_again(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, stats: Tensor, relu: bool
) -> Tensor:
    """Return the result of ``batch_norm_relu`` for ``x`` with the statistics that it returned, bit for bit."""
    x, other = x.contiguous(memory_format=LAST), None if other is None else other.contiguous(memory_format=LAST)
    out = torch.empty_like(x)
    table = _table(x, weight, bias, stats, out, relu, other=other)
    run(library(x.dtype).again, "batch_norm_relu", table, threads_for(x.numel()))
    return out


def _table(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    out: Tensor,
    relu: bool,
    *running: Tensor | None,
    other: Tensor | None = None,
) -> tuple[Tensor | int | None, ...]:
    rows = (x.numel() // max(1, x.shape[1]), x.shape[1], relu, x, LOW, out, LOW)
    return (*rows, *_vectors(weight, bias, *stats, *running or (None, None)), other, 0 if other is None else LOW)


def _vectors(*given: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return parameters and statistics, whose memory the kernels take as it is."""
    for t in given:
        if t is not None and not (t.is_contiguous() and t.dtype == torch.float32):
            raise ValueError(f"batch_norm_relu: {t.dtype} of strides {t.stride()}; legal: contiguous fp32")
    return given


def batch_norm_relu_backward(
    grad: Tensor,
    x: Tensor,
    out: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    stats: Tensor,
    relu: bool,
    wants_x: bool,
) -> list[Tensor]:
    """Return the gradients of weight and bias, fp32 [channels]; that of ``other``; that of ``x`` where it is wanted.

    grad: of the result of ``batch_norm_relu``; out: that result where something was added, whose places above zero the
    gradient goes through, else None. Sums are fp32 over 128 places and fp64 over all of them; the gradient of ``x`` is
    computed in fp32 and rounded once.
    """
    x, grad, width = x.contiguous(memory_format=LAST), grad.contiguous(memory_format=LAST), x.shape[1]
    grad, out = grad.to(x.dtype), None if out is None else out.contiguous(memory_format=LAST)
    sums = [torch.empty(width, dtype=torch.float32) for _ in range(4)]  # the last two are scratch
    dx = torch.empty_like(x) if wants_x else None
    masked = None if out is None else torch.empty_like(x)
    rows = (x.numel() // max(1, width), width, relu, x, LOW, grad, LOW)
    into, *others = ((t, 0 if t is None else LOW) for t in (dx, out, masked))
    table = (*rows, *into, *_vectors(weight, bias, *stats), *sums, *others[0], *others[1])
    run(library(x.dtype).backward, "batch_norm_relu", table, threads_for(x.numel()))
    return [*sums[:2], *(t for t in (masked, dx) if t is not None)]


def _fake_backward(
    grad: Tensor, x: Tensor, out: Tensor | None, weight: Tensor, bias: Tensor, stats: Tensor, relu: bool, wants_x: bool
) -> list[Tensor]:
    images = (out is not None) + wants_x
    return [*map(torch.empty_like, (weight, bias)), *(torch.empty_like(x, memory_format=LAST) for _ in range(images))]


define_operator(
    "batch_norm_relu(Tensor x, Tensor? other, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor weight, "
    "Tensor bias, float momentum, float eps, bool relu) -> (Tensor, Tensor)",
    batch_norm_relu,
    lambda x, other, mean, var, weight, *_: (
        torch.empty_like(x, memory_format=LAST),
        weight.new_empty((2, x.shape[1])),
    ),
)
define_operator(
    "batch_norm_relu_again(Tensor x, Tensor? other, Tensor weight, Tensor bias, Tensor stats, bool relu) -> Tensor",
    batch_norm_relu_again,
    lambda x, *given: torch.empty_like(x, memory_format=LAST),
)
define_operator(
    "batch_norm_relu_backward(Tensor grad, Tensor x, Tensor? out, Tensor weight, Tensor bias, Tensor stats, bool relu, "
    "bool wants_x) -> Tensor[]",
    batch_norm_relu_backward,
    _fake_backward,
)

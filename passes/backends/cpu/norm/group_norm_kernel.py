"""A group norm of channels_last images with gradients in compiled C, and its operator.

Before: ``group_norm(x, 8, weight, bias)``.
After: ``group_norm_low(x, 8, weight, bias, 1e-5)``: the same forward, and in backward
``amp_graph::group_norm_backward``.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load, threads_for
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.double_backward import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("group_norm_kernel.c")
LAST = torch.channels_last
LOW = 2  # what C calls low precision


@lru_cache
def library(low: torch.dtype) -> ctypes.CDLL:
    """Return the library for ``low``, bf16 or fp16. Raises CompilerError if it cannot be compiled."""
    found = load(SOURCE, MACROS[low])
    found.backward.argtypes, found.backward.restype = (ctypes.c_void_p, ctypes.c_int64), None
    return found


register_kernel("group_norm", lambda low: library(low))


def group_norm_low(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return ``F.group_norm(x, groups, weight, bias, eps)``.

    x: bf16 or fp16 images [batch, channels, height, width] on the CPU, channels_last; weight, bias: fp32 [channels].
    Forward is torch's own. Gradients are summed in fp32 by blocks of 128 places and in fp64 over these; that of ``x``
    is computed in fp32 and rounded once.
    """
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias))
    if not trains or leaves_to_torch(x, weight, bias):
        return _by_torch(x, groups, weight, bias, eps)
    return _GroupNorm.apply(x, groups, weight, bias, eps)


def _by_torch(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the same by torch's own operations, whose batched derivatives need contiguous images."""
    special = leaves_to_torch(x, weight, bias) or torch.is_grad_enabled()
    return F.group_norm(x.contiguous() if special else x, groups, weight, bias, eps)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        batch, channels, height, width = x.shape
        out, mean, invstd = torch.native_group_norm(x, weight, bias, batch, channels, height * width, groups, eps)
        ctx.save_for_backward(x, weight, bias, mean, invstd)
        ctx.groups, ctx.eps = groups, eps
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias, mean, invstd = ctx.saved_tensors
        need = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        if is_plain(grad):
            again = lambda x, w, b: _by_torch(x, ctx.groups, w, b, ctx.eps)  # noqa: E731
            dx, dweight, dbias = gradients_by_torch(again, (x, weight, bias), need, (grad,))
            return dx, None, dweight, dbias, None
        dweight, dbias, *made = OPS.group_norm_backward(grad, x, weight, mean, invstd, ctx.groups, need[0])
        return made[0] if made else None, None, dweight if need[1] else None, dbias if need[2] else None, None


def group_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, groups: int, wants_x: bool
) -> list[Tensor]:
    """Return the gradients of weight and bias, fp32 [channels], and that of ``x`` in its dtype where it is wanted.

    grad: of the result; mean, invstd: fp32 [batch, groups], as ``native_group_norm`` made them.
    """
    x, grad = x.contiguous(memory_format=LAST), grad.to(x.dtype).contiguous(memory_format=LAST)
    images, channels = x.shape[:2]
    weight, mean, invstd = (t.contiguous() for t in (weight, mean, invstd))
    sums = torch.empty(images, 2, channels, dtype=torch.float64)
    scratch = torch.empty(images, 3, channels)
    dx = torch.empty_like(x) if wants_x else None
    rows = (n for t in (x, grad, dx) for n in ((0, 0) if t is None else (address_of(t), LOW)))
    places = x.shape[2] * x.shape[3]
    others = (address_of(t) for t in (weight, mean, invstd, sums, scratch))
    table = array("q", (images, places, channels, groups, *rows, *others))
    library(x.dtype).backward(table.buffer_info()[0], threads_for(x.numel()))
    deep = channels // groups
    mean, invstd = (t.view(images, groups).double().repeat_interleave(deep, 1) for t in (mean, invstd))
    dweight = ((sums[:, 1] - mean * sums[:, 0]) * invstd).sum(0).float()
    found = [dweight, sums[:, 0].sum(0).float()]
    return found if dx is None else [*found, dx]


def _fake(x: Tensor, weight: Tensor, wants_x: bool) -> list[Tensor]:
    made = [weight.new_empty(weight.shape) for _ in range(2)]
    return [*made, torch.empty_like(x, memory_format=LAST)] if wants_x else made


define_as_typed(group_norm_backward, _fake)

"""Operators of a residual sum and the following norm over compiled C, named in graphs.

Before: ``add``, ``native_layer_norm`` and ``_to_copy``, each over all of memory.
After: ``residual_norm``, and in backward ``residual_norm_backward``: one pass each, with casts in registers.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.backends.cpu.norm.add_norm_by_torch import norm_by_torch, norm_gradients_by_torch
from amp_graph.passes.memory.huge_pages import empty_like
from amp_graph.passes.native.jit_compiler import MACROS, PARTS, load, threads_for
from amp_graph.passes.native.kernel_table import load_kernel, register_kernel
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_as_typed
from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("add_norm_kernel.c")


@lru_cache
def library(low: torch.dtype, backward: bool = False) -> ctypes.CDLL:
    """Return the library for ``low``, bf16 or fp16, one direction. Raises CompilerError if it cannot be compiled."""
    return load(SOURCE, (*MACROS[low], *PARTS[backward]))


register_kernel("add_norm", lambda low: library(low))
register_kernel("add_norm_backward", lambda low: library(low, True))


def residual_norm(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    low: torch.dtype,
    wants_low: bool,
    wants_full: bool,
    centered: bool,
) -> list[Tensor]:
    """Return the statistics of ``x + branch``, that sum where there is a branch, and its norm in ``low`` and in fp32.

    x, branch: fp32 or ``low``, of one shape, rows of ``width``; weight, bias: fp32 or ``low``, ``width`` elements.
    statistics: fp32 [2, rows], mean and reciprocal deviation; the sum has the wider dtype of its parts, and is what is
    normed. The norm is computed in fp32 and rounded once. ``centered``: a layer norm, else an RMS norm, of mean 0.
    """
    other = _of_device(x.device.type, low, norm_by_torch, "forward")
    if other is not None:
        return other(x, branch, weight, bias, width, eps, low, wants_low, wants_full, centered)
    x = x.contiguous()
    branch, weight, bias = (None if t is None else t.contiguous() for t in (branch, weight, bias))
    rows = x.numel() // max(1, width)
    stats = torch.empty((2, rows), dtype=torch.float32)
    total = None if branch is None else empty_like(x if x.dtype.itemsize > 2 else branch)
    cast = empty_like(x, dtype=low) if wants_low else None
    wide = empty_like(x, dtype=torch.float32) if wants_full else None
    place = address_of(stats)
    table = array(
        "q", (rows, width, centered, *_rows(x, branch, weight, bias, total, cast, wide), place, place + 4 * rows)
    )
    _run(library(low).forward, table, ctypes.c_double(eps), _threads(x))
    return [stats, *(t for t in (total, cast, wide) if t is not None)]


def residual_norm_backward(
    grads: list[Tensor],
    grad_sum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    width: int,
    low: torch.dtype,
    wants_full: bool,
    wants_low: bool,
    wants_weight: bool,
    wants_bias: bool,
    centered: bool,
) -> list[Tensor]:
    """Return the gradient of the sum in fp32, and in ``low``, and those of weight and bias: of these, what is wanted.

    grads: of the norm's results, fp32 or ``low``, one or more, added in fp32; grad_sum: by other readers of the sum.
    total, stats: as ``residual_norm`` made them. Gradients of weight and bias: fp32 [width], summed in blocks of fp32
    that are added up in fp64.
    """
    other = _of_device(total.device.type, low, norm_gradients_by_torch, "backward")
    if other is not None:
        wants = (wants_full, wants_low, wants_weight, wants_bias)
        return other(grads, grad_sum, total, stats, weight, width, low, *wants, centered)
    grads = [g.contiguous() for g in grads]
    grad_sum, weight = (None if t is None else t.contiguous() for t in (grad_sum, weight))
    total, rows = total.contiguous(), stats.shape[1]
    dsum = empty_like(total, dtype=torch.float32) if wants_full else None
    dlow = empty_like(total, dtype=low) if wants_low else None
    dweight, dbias = (
        torch.empty(width, dtype=torch.float32) if wanted else None for wanted in (wants_weight, wants_bias)
    )
    more, place = array("q", _rows(*grads[1:])), address_of(stats)
    table = array("q", (rows, width, centered, len(grads) - 1, more.buffer_info()[0]))
    table.extend(_rows(grads[0], grad_sum, total, weight, dsum, dlow))
    table.extend((place, place + 4 * rows, *(0 if t is None else address_of(t) for t in (dweight, dbias))))
    _run(library(low, True).backward, table, _threads(total))
    return [t for t in (dsum, dlow, dweight, dbias) if t is not None]


def _of_device(device: str, low: torch.dtype, by_torch: Callable[..., list[Tensor]], direction: str) -> Any:
    """Return what computes a direction on another device: its kernel, or torch. None: the kernel of this file."""
    try:
        found = load_kernel(f"add_norm on {device}", low)
    except CompilerError:
        return by_torch
    return getattr(found, direction) if found is not None else None if device == "cpu" else by_torch


def _run(function: Any, table: array[int], *options: Any) -> None:
    if function(ctypes.c_void_p(table.buffer_info()[0]), *options):
        raise MemoryError("residual_norm: no memory for a few rows")


def _rows(*tensors: Tensor | None) -> list[int]:
    """Return the C struct Rows of each: two words."""
    found: list[int] = []
    for t in tensors:
        found += (0, 0) if t is None else (address_of(t), 1 if t.dtype == torch.float32 else 2)
    return found


def _threads(like: Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(threads_for(like.numel()))


def _fake(
    x: Tensor, branch: Tensor | None, width: int, low: torch.dtype, wants_low: bool, wants_full: bool
) -> list[Tensor]:
    made = [x.new_empty((2, x.numel() // max(1, width)), dtype=torch.float32)]
    dtypes = [] if branch is None else [torch.promote_types(x.dtype, branch.dtype)]
    dtypes += [low] * wants_low + [torch.float32] * wants_full
    return made + [x.new_empty(x.shape, dtype=dtype) for dtype in dtypes]


def _fake_backward(
    total: Tensor,
    width: int,
    low: torch.dtype,
    wants_full: bool,
    wants_low: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> list[Tensor]:
    dtypes = [torch.float32] * wants_full + [low] * wants_low
    made = [total.new_empty(total.shape, dtype=dtype) for dtype in dtypes]
    return made + [total.new_empty((width,), dtype=torch.float32) for _ in range(wants_weight + wants_bias)]


define_as_typed(residual_norm, _fake)
define_as_typed(residual_norm_backward, _fake_backward)

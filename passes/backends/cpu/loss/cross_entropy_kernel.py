"""The cross entropy of low-precision logits, and its gradient, by compiled C on the CPU.

Before: some rows upcast, ``log_softmax``, ``gather``.
After: ``losses_of_rows(flat, target)``, one pass of C; None without a compiler, or if the logits are not on the CPU.
"""

from __future__ import annotations

import ctypes
from array import array
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import kernel
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("cross_entropy_kernel.c")
LOW, NONE = 2, 0  # the kernel's codes for low precision, and for none


@kernel("cross_entropy")
def library(low: torch.dtype) -> ctypes.CDLL | None:
    """Return what is compiled for ``low``, bf16 or fp16; None where nothing can be compiled."""
    found = load_if_possible(SOURCE, MACROS[low])
    if found is not None:
        found.rows.argtypes = found.backward.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    return found


def losses_of_rows(flat: Tensor, target: Tensor, ignore: int) -> Tensor | None:
    """Return the loss of each row of ``flat`` [rows, classes] as fp32 [rows], 0 where the target is ``ignore``."""
    found = _library(flat)
    if found is None or not _are_classes(target, ignore, flat.shape[1]):
        return None
    flat, target = flat.contiguous(), _places(target, ignore)
    losses = torch.empty(flat.shape[0], dtype=torch.float32)
    table = (*flat.shape, address_of(flat), LOW, 0, NONE, address_of(target), 0, 0, 0, address_of(losses))
    return None if _fails(found.rows, table, flat) else losses


def write_gradient_of_rows(
    made: Tensor, flat: Tensor, target: Tensor, ignore: int, whole: Tensor, others: Tensor | None
) -> bool:
    """Write ``softmax(flat) * whole``, less ``whole`` at each row's target, plus ``others``, to ``made``.

    made: contiguous, as ``flat``, which it may be; whole: fp32 [rows, 1], not read where the target is ``ignore``;
    others: fp32, of the shape of ``flat``. False: nothing was written.
    """
    found = _library(flat)
    if found is None or not _are_classes(target, ignore, flat.shape[1]):
        return False
    flat, target, whole = flat.contiguous(), _places(target, ignore), whole.contiguous()
    at_target, others = -whole, None if others is None else others.contiguous()
    added = 0 if others is None else address_of(others)
    given = (address_of(target), address_of(whole), address_of(at_target), added, 0)
    table = (*flat.shape, address_of(flat), LOW, address_of(made), LOW, *given)
    return not _fails(found.backward, table, flat)


def _library(flat: Tensor) -> ctypes.CDLL | None:
    fits = type(flat) in (Tensor, torch.nn.Parameter) and flat.device.type == "cpu" and flat.dtype in MACROS
    return library(flat.dtype) if fits and flat.numel() else None


def _are_classes(target: Tensor, ignore: int, classes: int) -> bool:
    """Say whether every counted target is a class; others raise where torch looks them up."""
    counted = target[target != ignore]
    return not counted.numel() or (0 <= int(counted.min()) and int(counted.max()) < classes)


def _places(target: Tensor, ignore: int) -> Tensor:
    """Return the targets, -1 for ignored ones."""
    return target.masked_fill(target == ignore, -1).contiguous()


def _fails(function: ctypes._NamedFuncPointer, numbers: tuple[int, ...], flat: Tensor) -> bool:
    table = array("q", numbers)
    return bool(function(table.buffer_info()[0], threads_for(flat.numel())))

"""Transposed matrices laid out in rows, by compiled C, for products that are slow for columns.

Before: ``grad.t() @ x``, the gradient of a linear's weight, for which oneDNN turns ``grad`` itself, at two thirds of
the speed of the linear's other products. After: ``turned(grad.t()) @ x``.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native_code import load_if_possible, threads_for
from amp_graph.passes.operators import OPS, define_as_typed
from amp_graph.passes.torch_private import is_batched, is_in_mode, is_seen
from amp_graph.passes.what_pays import turning_pays

SOURCE = Path(__file__).with_name("transpose_kernel.c")
LINE = 32  # numbers of 16 bits in a line of memory
FAR = 256  # numbers: rows a multiple of them apart share few places of the caches


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None where nothing can be compiled."""
    found = load_if_possible(SOURCE)
    if found is not None:
        found.transpose.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return found


def turned(a: Tensor) -> Tensor:
    """Return ``a``, a matrix of 16-bit numbers on the CPU whose columns lie in memory, with rows that do.

    [rows, columns], rows somewhat further apart than they are long. Of anything else torch makes such a copy.
    """
    if is_seen(a):
        found: Tensor = OPS.turned_operand(a)  # what a tracer or a profiler sees
        return found
    return turned_operand(a)


def turned_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.t() @ b`` of matrices of rows, ``a`` turned beforehand where ``what_pays`` says so.

    Second derivatives and several gradients at once are torch's own.
    """
    pays = turning_pays(b.device.type, b.dtype, len(b), a.shape[1], b.shape[1])
    if not pays or torch.is_grad_enabled() or is_batched(a):
        return torch.mm(a.t(), b)
    return torch.mm(turned(a.t()), b)


def turned_operand(a: Tensor) -> Tensor:
    """Return a copy of ``a`` [rows, columns] whose rows lie in memory."""
    made = _room(a)
    found = library()
    if found is None or a.stride(0) != 1 or a.element_size() != 2 or a.device.type != "cpu" or is_in_mode(a):
        return made.copy_(a)
    columns, rows = a.shape  # of what lies in memory: what C reads is the transpose
    table = array("q", (a.data_ptr(), made.data_ptr(), rows, columns, a.stride(1), made.stride(0)))
    found.transpose(table.tobytes(), threads_for(a.numel()))
    return made


def _room(a: Tensor) -> Tensor:
    apart = -(-a.shape[1] // LINE) * LINE
    return a.new_empty_strided(a.shape, (apart + LINE if apart % FAR == 0 else apart, 1))


define_as_typed(turned_operand, _room)

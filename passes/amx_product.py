"""Products of bf16 matrices by the matrix units of the CPU (AMX), in compiled C.

Before: ``(grad.t() @ x).float()``, the gradient of a linear's weight, for which oneDNN turns ``grad`` first, at two
thirds of the speed of the linear's other products; and which is then cast. After:
``amx_product(grad.t(), x, wide=True)``.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native_code import threads_at_once
from amp_graph.passes.operators import OPS, define_as_typed
from amp_graph.passes.tiled_code import MATRIX_UNITS, built
from amp_graph.passes.torch_private import is_batched, is_seen
from amp_graph.passes.what_pays import amx_product_pays

SOURCE = Path(__file__).with_name("amx_product.c")
OF_AN_ELEMENT = 64  # multiplications in the time that one element of other kernels takes


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None where nothing can be compiled, or the CPU has no matrix units."""
    found = built(SOURCE, *MATRIX_UNITS)
    return None if found is None else typed(found)


def typed(found: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the types of its function."""
    found.product.argtypes = (ctypes.c_char_p,)
    return found


def gradient_of_weight(grad: Tensor, x: Tensor, wide: bool) -> Tensor:
    """Return ``grad.t() @ x`` of bf16 matrices, rounded once; by compiled C where ``what_pays`` says so.

    grad: [rows, outputs], x: [rows, inputs]. ``wide``: compiled C's is cast to fp32. Second derivatives and several
    gradients at once are torch's own.
    """
    pays = amx_product_pays(x.device.type, x.dtype, len(x), grad.shape[1], x.shape[1])
    if not pays or torch.is_grad_enabled() or is_batched(grad) or library() is None:
        return torch.mm(grad.t(), x)
    if is_seen(grad):
        found: Tensor = OPS.amx_product(grad.t(), x, None, wide)  # what a tracer or a profiler sees
        return found
    return amx_product(grad.t(), x, None, wide)


def amx_product(a: Tensor, b: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Return ``a @ b + bias``, rounded once, of bf16 matrices on the CPU: [rows, columns]; ``wide``: cast to fp32.

    a: [rows, depth], b: [depth, columns], bias: [columns] or None, with memory of their own to read. Raises
    MemoryError.
    """
    made, compiled = room(a, b, wide), library()
    (rows, columns), depth = made.shape, a.shape[1]
    if compiled is None or 0 in (rows, columns, depth):
        return made.copy_(a @ b if bias is None else torch.addmm(bias, a, b))
    a, b = side_by_side(a), side_by_side(b)
    if bias is not None and not (bias.numel() == columns and bias.is_contiguous()):
        bias = bias.expand(columns).contiguous()
    threads = threads_at_once(rows * columns * depth // OF_AN_ELEMENT)
    given = (a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr(), made.data_ptr())
    table = array("q", (*given, rows, columns, depth, *a.stride(), *b.stride(), wide, threads))
    if compiled.product(table.tobytes()):
        raise MemoryError(f"a product of {rows} x {depth} by {depth} x {columns}: no memory to lay it out")
    return made


def room(a: Tensor, b: Tensor, wide: bool) -> Tensor:
    """Return memory for ``a @ b``."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32 if wide else a.dtype)


def side_by_side(t: Tensor) -> Tensor:
    """Return ``t`` with elements that are neighbours in one direction at least."""
    return t if 1 in t.stride() else t.contiguous()


define_as_typed(amx_product, room)

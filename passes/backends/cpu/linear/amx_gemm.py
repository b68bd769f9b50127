"""bf16 matmuls on the matrix units of the CPU (AMX), in compiled C.

Before: ``grad.t() @ x``, the gradient of a linear's weight, for which oneDNN transposes ``grad`` first, at
two thirds of the speed of the linear's other matmuls.
After: ``amx_product(grad.t(), x)``.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.gemm_thresholds import amx_product_is_profitable
from amp_graph.passes.native.jit_compiler import threads_at_once
from amp_graph.passes.native.kernel_table import MATRIX_UNITS, STRUCT, built, kernel
from amp_graph.passes.native.operator_library import called, define_as_typed
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("amx_gemm.c")
OF_AN_ELEMENT = 64  # multiply-adds in the time that other kernels take for one element

FUNCTIONS = {"product": (STRUCT,)}
# The compiled kernel; None where nothing can be compiled, or the CPU has no matrix units.
library = kernel("amx_gemm", lambda low: built(SOURCE, *MATRIX_UNITS), FUNCTIONS)


def gradients_of_linear(grad: Tensor, x: Tensor, *, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Return ``grad.t() @ x`` of bf16 matrices, rounded once; and, if ``biased``, the column sums of ``grad``.

    grad: [rows, outputs], x: [rows, inputs]. By compiled C where that is profitable. Second derivatives and batched
    gradients are torch's own.
    """
    profitable = amx_product_is_profitable(x.device.type, x.dtype, len(x), grad.shape[1], x.shape[1])
    if not profitable or torch.is_grad_enabled() or is_batched(grad) or library() is None:
        return torch.mm(grad.t(), x), grad.sum(0) if biased else None
    if not biased:
        return called(amx_product, grad.t(), x), None
    product, sums = called(amx_product_and_sums, grad, x)
    return product, sums


def amx_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, rounded once, of bf16 CPU matrices: [rows, columns].

    a: [rows, depth], b: [depth, columns], bias: [columns] or None, with readable memory of their own. Raises
    MemoryError.
    """
    if library() is None or 0 in (*a.shape, *b.shape):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    if bias is not None and not (bias.numel() == b.shape[1] and bias.is_contiguous()):
        bias = bias.expand(b.shape[1]).contiguous()
    return multiply_into(room(a, b), a, b, bias)


def amx_product_and_sums(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return ``a.t() @ b`` as ``amx_product`` does, and the column sums of ``a``, fp32 rounded once to bf16.

    a: [depth, rows], b: [depth, columns]. Reads ``a`` once. Raises MemoryError.
    """
    if library() is None or 0 in (*a.shape, *b.shape) or a.stride(1) != 1 or a.stride(0) == 1:
        return [amx_product(a.t(), b), a.sum(0)]
    sums = a.new_empty(a.shape[1], dtype=torch.float32)
    return [multiply_into(room(a.t(), b), a.t(), b, None, sums), sums.to(a.dtype)]


def multiply_into(made: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
    """Write ``a @ b + bias`` to contiguous rows of ``made``, bf16; and the row sums of ``a``."""
    a, b, compiled = side_by_side(a), side_by_side(b), library()
    assert compiled is not None, "asked where there is a kernel"
    (rows, columns), depth = made.shape, a.shape[1]
    threads = threads_at_once(rows * columns * depth // OF_AN_ELEMENT)
    others = (0 if t is None else address_of(t) for t in (bias, sums))
    table = array("q", (address_of(a), address_of(b), *others, address_of(made), rows, columns, depth))
    table.extend((*a.stride(), *b.stride(), threads))
    if compiled.product(table.tobytes()):
        raise MemoryError(f"a product of {rows} x {depth} by {depth} x {columns}: no memory to lay it out")
    return made


def room(a: Tensor, b: Tensor) -> Tensor:
    """Return memory for ``a @ b``."""
    return a.new_empty((a.shape[0], b.shape[1]))


def side_by_side(t: Tensor) -> Tensor:
    """Return ``t`` with contiguous elements in at least one direction."""
    return t if 1 in t.stride() else t.contiguous()


define_as_typed(amx_product, room)
define_as_typed(amx_product_and_sums, lambda a, b: [room(a.t(), b), a.new_empty(a.shape[1])])

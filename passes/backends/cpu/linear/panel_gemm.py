"""bf16 linears over few rows on the CPU, without gradients, by compiled C.

Before: ``linear_of_packed_weight(x, packed, bias)``, a call of oneDNN.
After: ``linear_by_panels(x, panels, bias)``, by ``panel_gemm.c`` on unpacked rows: three times as fast up to 32 rows of
64 x 64.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path

from torch import Tensor

from amp_graph.passes.native.jit_compiler import threads_at_once
from amp_graph.passes.native.kernel_table import NUMBER, STRUCT, best, kernel, required
from amp_graph.passes.native.operator_library import define_as_typed
from amp_graph.passes.torch_compat.storage import address_of

OF_AN_ELEMENT = 8  # multiply-adds in the time that other kernels take for one element
SOURCE = Path(__file__).with_name("panel_gemm.c")

FUNCTIONS = {"lay_out": (STRUCT, NUMBER, NUMBER, STRUCT), "product": (STRUCT,)}
# The compiled kernel; None where nothing can be compiled, or the CPU lacks its instructions.
library = kernel("panel_gemm", lambda low: best(SOURCE), FUNCTIONS)


def panels_of(weight: Tensor) -> Tensor:
    """Return a bf16 ``weight`` [outputs, inputs] in the kernel's layout: panels of its outputs, flattened."""
    compiled = required(library())
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    made = weight.new_empty(_up(outputs, compiled.panel()) * _up(inputs, compiled.deep()))
    compiled.lay_out(address_of(weight), outputs, inputs, address_of(made))
    return made


def dense_of(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the weight [outputs, inputs] that lies in ``panels``."""
    compiled = required(library())
    columns, pairs = compiled.panel(), _up(inputs, compiled.deep()) // 2
    panel = _up(outputs, columns) // columns, pairs, columns, 2
    parted = panels.view(panel).transpose(1, 2).reshape(_up(outputs, columns), 2 * pairs)
    return parted[:outputs, :inputs]


def linear_by_panels(x: Tensor, panels: Tensor, bias: Tensor | None, relu: bool, outputs: int) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, with an optional relu: [..., outputs], bf16.

    x: [..., inputs], bias: [outputs] or None, both bf16 with readable memory of their own. Raises MemoryError.
    """
    rows, made = as_rows(x), _room(x, outputs)
    sizes = (len(rows), outputs, rows.shape[1])
    _run(rows, panels, (1, 0), bias, made, sizes, in_panels=True, relu=relu)
    return made


def _room(x: Tensor, outputs: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias``, rounded once to bf16: [rows, columns].

    a: [rows, depth], b: [depth, columns], contiguous in one direction; bias: [columns] or None, all bf16 with readable
    memory of their own. Raises MemoryError.
    """
    made = a.new_empty((a.shape[0], b.shape[1]))
    _run(a, b, b.stride(), bias, made, (*made.shape, a.shape[1]), in_panels=False, relu=False)
    return made


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` [..., width] as a matrix with contiguous rows."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(math.prod(x.shape[:-1]), x.shape[-1])


def _run(
    a: Tensor,
    b: Tensor,
    b_steps: tuple[int, ...],
    bias: Tensor | None,
    made: Tensor,
    sizes: tuple[int, ...],
    *,
    in_panels: bool,
    relu: bool,
) -> None:
    compiled = required(library())
    if bias is not None and not (bias.numel() == sizes[1] and bias.is_contiguous()):
        bias = bias.expand(sizes[1]).contiguous()
    added = 0 if bias is None else address_of(bias)
    threads = threads_at_once(sizes[1] * sizes[2] * max(OF_AN_ELEMENT, sizes[0]) // OF_AN_ELEMENT)
    steps = (*a.stride(), *b_steps)
    table = (address_of(a), address_of(b), added, address_of(made), *sizes, *steps, in_panels, relu, threads)
    if compiled.product(array("q", table).tobytes()):
        raise MemoryError(f"a product of {sizes[0]} x {sizes[2]} by {sizes[2]} x {sizes[1]}: no memory to lay it out")


def _up(count: int, by: int) -> int:
    return -(-count // by) * by


define_as_typed(linear_by_panels, _room)

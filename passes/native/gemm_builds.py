"""Build variants of GEMM kernels: for AMX matrix units, or for bf16 dot products of AVX-512.

Before: a source that includes ``gemm_tiles.h``, or ``amx_tiles.h`` if MATRIX_UNITS is defined.
After: the library that suits this CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from amp_graph.passes.native.jit_compiler import load_if_possible
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16

DOT_PRODUCTS = ("-mavx512bf16",)
MATRIX_UNITS = ("-mamx-tile", "-mamx-bf16", "-DMATRIX_UNITS")


def best(source: Path, part: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the fastest build of ``source`` for this CPU; None without a compiler or the required instructions.

    ``part``: macros that select a part of the source.
    """
    return built(source, *MATRIX_UNITS, part=part) or built(source, part=part)


def built(source: Path, *flags: str, part: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return the build of ``source`` with ``flags``: dot products, or ``MATRIX_UNITS``; None if it cannot run."""
    if not cpu_has_bf16() or (flags and not cpu_has_amx()):
        return None
    found = load_if_possible(source, (*DOT_PRODUCTS, *flags, *part))
    return found if found is not None and found.has_tiles() else None

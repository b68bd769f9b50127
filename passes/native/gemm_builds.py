"""Compiled C that multiplies tile by tile: by the matrix units of CPUs with AMX, or by dot products of bf16.

Before: a source that includes ``gemm_tiles.h``, or ``amx_tiles.h`` where MATRIX_UNITS is defined. After: the library
that suits this CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from amp_graph.passes.native.jit_compiler import load_if_possible
from amp_graph.passes.torch_compat.cpu import cpu_has_amx, cpu_has_bf16

DOT_PRODUCTS = ("-mavx512bf16",)
MATRIX_UNITS = ("-mamx-tile", "-mamx-bf16", "-DMATRIX_UNITS")


def best(source: Path, part: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return ``source`` as it is fastest here; None where there is no compiler, or the CPU lacks its instructions.

    ``part``: macros that say which part of it.
    """
    return built(source, *MATRIX_UNITS, part=part) or built(source, part=part)


def built(source: Path, *flags: str, part: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """Return ``source`` as ``flags`` build it: for dot products, or for ``MATRIX_UNITS``; None where it cannot run."""
    if not cpu_has_bf16() or (flags and not cpu_has_amx()):
        return None
    found = load_if_possible(source, (*DOT_PRODUCTS, *flags, *part))
    return found if found is not None and found.has_tiles() else None

"""A registry of compiled kernels by name: whether this machine has one; and the builds of GEMM kernels for its CPU.

Before: the cost model imports a kernel's module to ask whether it can be compiled.
After: ``is_available("panel_gemm")``; in the kernel's module ``library = kernel("panel_gemm", ...)`` loads it.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_graph.lists.errors import first_line
from amp_graph.passes.native.code_cache import FIX, refusal
from amp_graph.passes.native.jit_compiler import CompilerError, load_if_possible
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16
from amp_graph.passes.torch_compat.storage import address_of

# What the functions of a library take, by name: a struct, by its address or its bytes, and numbers.
Functions = Mapping[str, tuple[Any, ...]]
STRUCT, NUMBER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
DOT_PRODUCTS = ("-mavx512bf16",)
MATRIX_UNITS = ("-mamx-tile", "-mamx-bf16", "-DMATRIX_UNITS")
_loaders: dict[str, Callable[[torch.dtype], object]] = {}


def kernel(name: str, find: Callable[[torch.dtype], ctypes.CDLL | None], functions: Functions) -> Callable[..., Any]:
    """Register the kernel ``name``, and return its loader, which compiles once for each low precision.

    find: returns the library for a low precision; None, or a CompilerError, if this machine has none. functions: what
    it is called for.
    """

    def load(low: torch.dtype = torch.bfloat16) -> ctypes.CDLL | None:
        found = find(low)
        return None if found is None else typed(found, functions)

    _loaders[name] = kept = lru_cache(load)
    return kept


def typed(found: ctypes.CDLL, functions: Functions) -> ctypes.CDLL:
    """Return a library with the types of what its ``functions`` take."""
    for name, takes in functions.items():
        getattr(found, name).argtypes = takes
    return found


def is_available(name: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Say whether an imported module has the kernel ``name`` and it runs here; compiles it if that was not done yet."""
    loader = _loaders.get(name)
    return loader is not None and not why_missing(loader, dtype) and loader(dtype) is not None


def why_missing(load: Callable[[torch.dtype], object], dtype: torch.dtype) -> str:
    """Return why a kernel's loader raises CompilerError for ``dtype``; "" if it does not."""
    try:
        load(dtype)
    except CompilerError as error:
        return first_line(error)
    return ""


def required(compiled: ctypes.CDLL | None) -> ctypes.CDLL:
    """Return the library of an operator; raises CompilerError without one, which the tracer of a graph asked for.

    A graph that was traced in one process may be run in another one.
    """
    if compiled is None:
        raise refusal(
            "a graph that was traced in another process calls code that this one has not",
            f"a graph that is traced in this process; or {FIX}",
        )
    return compiled


def run(function: Callable[..., int], what: str, table: Iterable[Tensor | int | None], *numbers: float) -> None:
    """Call a compiled ``function`` with a struct, 64 bits a field, and ``numbers``; a tensor stands for its address.

    None stands for 0. Raises MemoryError, which ``what`` names, if the function has not enough memory for a few rows.
    """
    fields = [0 if n is None else address_of(n) if isinstance(n, Tensor) else n for n in table]
    if function(array("q", fields).tobytes(), *numbers):
        raise MemoryError(f"{what}: no memory for a few rows")


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

"""A registry of compiled kernels by name: whether this machine has one; and the builds of GEMM kernels for its CPU.

Before: the cost model imports a kernel's module to ask whether it can be compiled.
After: ``is_available("panel_gemm")``; in the kernel's module the function that loads it has ``@kernel("panel_gemm")``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from amp_graph.passes.native.code_cache import FIX, refusal
from amp_graph.passes.native.jit_compiler import CompilerError, load_if_possible
from amp_graph.passes.torch_compat.devices import cpu_has_amx, cpu_has_bf16

# Returns the compiled library for a low precision; None, or a CompilerError, if this machine has none.
Loader = TypeVar("Loader", bound=Callable[..., Any])
DOT_PRODUCTS = ("-mavx512bf16",)
MATRIX_UNITS = ("-mamx-tile", "-mamx-bf16", "-DMATRIX_UNITS")
_loaders: dict[str, Callable[[torch.dtype], object]] = {}


def kernel(name: str) -> Callable[[Loader], Loader]:
    """Register the loader of the kernel ``name``, which is called once for each low precision."""

    def registered(loader: Loader) -> Loader:
        kept: Any = lru_cache(loader)
        _loaders[name] = kept
        return kept

    return registered


def load_kernel(name: str, dtype: torch.dtype = torch.bfloat16) -> object:
    """Return the library of a kernel for ``dtype``; None if no imported module has registered that kernel.

    Raises CompilerError where the kernel's own loader does.
    """
    loader = _loaders.get(name)
    return None if loader is None else loader(dtype)


def is_available(name: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Say whether the kernel ``name`` runs on this machine; compiles it if that was not done yet."""
    try:
        return load_kernel(name, dtype) is not None
    except CompilerError:
        return False


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

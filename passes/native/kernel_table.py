"""A registry of compiled kernels by name: whether this machine has one, and a loader to call before the first use.

Before: the cost model imports a kernel's module to ask whether it can be compiled.
After: ``is_available("panel_gemm")``; the kernel's module calls ``register_kernel("panel_gemm", ...)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from amp_graph.passes.native.jit_compiler import CompilerError

# Returns the compiled library for a low precision; None, or a CompilerError, if this machine has none.
Loader = Callable[[torch.dtype], object]
_loaders: dict[str, Loader] = {}


def register_kernel(name: str, loader: Loader) -> None:
    """Register the loader of the kernel ``name``; a later call finds the library loaded."""
    _loaders[name] = loader


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

"""The compiled kernels that there are, by name: whether this machine has one, and what loads it ahead of its use.

Before: the cost model imports the module of a kernel, to ask whether it can be compiled. After:
``is_available("panel_gemm")``; the module of the kernel says ``register_kernel("panel_gemm", ...)``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from amp_graph.passes.native.jit_compiler import CompilerError

# Returns the compiled library for a low precision; None, or a CompilerError, where there is none on this machine.
Loader = Callable[[torch.dtype], object]
_loaders: dict[str, Loader] = {}


def register_kernel(name: str, loader: Loader) -> None:
    """Say what compiles and loads the kernel ``name``, which later calls find loaded."""
    _loaders[name] = loader


def load_kernel(name: str, dtype: torch.dtype = torch.bfloat16) -> object:
    """Return the library of a kernel for ``dtype``; None where no module that is imported has that kernel.

    Raises CompilerError where the kernel's own loader does.
    """
    loader = _loaders.get(name)
    return None if loader is None else loader(dtype)


def is_available(name: str, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Say whether the kernel ``name`` runs on this machine; compiles it where that was not done yet."""
    try:
        return load_kernel(name, dtype) is not None
    except CompilerError:
        return False


def kernel_names() -> tuple[str, ...]:
    """Return the names of the kernels that imported modules have, in the order of their import."""
    return tuple(_loaders)

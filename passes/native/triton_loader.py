"""Launches Triton kernels where the machine runs them, and says why where it does not.

Before: ``import triton``, a package of a gigabyte that may be missing, whose compiler may fail.
After: ``launch("amp_graph....cross_entropy_source", "rows_kernel", programs, args)``, or a CompilerError that says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.native.run_compiler import CompilerError
from amp_graph.passes.torch_compat.fake import outside_modes

# What is rounded to bf16 by one instruction, from Ampere on; older GPUs were not tried.
LEAST_CAPABILITY = (8, 0)
MOST_PROGRAMS = 2**31 - 1  # of a grid's first dimension; the others end at 65,535
_failed: dict[str, str] = {}  # what did not compile, run or compute as torch does, and why: one attempt per process


def why_no_triton() -> str:
    """Return why no Triton kernel runs here, or "".

    Without a GPU nothing runs, but a graph may be planned for one. In Triton's interpreter tensors are on the CPU.
    """
    if not _is_installed():
        return "the package triton is not installed"
    if interprets() or not torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return "the kernels were written for NVIDIA's GPUs"
    found = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if found < LEAST_CAPABILITY:
        return f"compute capability {found[0]}.{found[1]} is below {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return ""


def interprets() -> bool:
    """Say whether Triton interprets its kernels, on the CPU: the variable that it reads when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_failed() -> dict[str, str]:
    """Return the modules of kernels that this process gave up, and why."""
    return dict(_failed)


def require(module: str, check: Callable[[torch.device], str]) -> None:
    """Raise CompilerError where the kernels of ``module`` do not run, or do not compute what torch does.

    check: runs them on small tensors of a device, and returns what is wrong; it is called once per process, where
    there is a device to run on.
    """
    why = why_no_triton() or _failed.get(module, "")
    if not why and module not in _checked and (interprets() or torch.cuda.is_available()):
        why = _checked_on(torch.device("cpu" if interprets() else "cuda"), check)
        _checked.add(module)
        if why:
            _failed.setdefault(module, why)  # or the error that a launch met
    if why:
        raise CompilerError(f"no Triton kernel: {_failed.get(module, why)}")


def _checked_on(device: torch.device, check: Callable[[torch.device], str]) -> str:
    try:
        with outside_modes(), torch.inference_mode(False), torch.no_grad():  # whatever the call does that is planned
            return check(device)
    except Exception as error:  # of a device that is out of memory, of a torch that lacks what the check asks of it
        return f"{type(error).__name__}: {error}".partition("\n")[0]


_checked: set[str] = set()


def launch(
    module: str, kernel: str, programs: int, given: tuple[Any, ...], *, warps: int = 8, **constants: Any
) -> None:
    """Launch ``programs`` of a kernel on ``given``, whose first argument is a tensor of the device.

    constants: what the kernel is compiled for. Raises CompilerError where it does not compile or cannot be launched;
    nothing was written then.
    """
    if module in _failed or programs > MOST_PROGRAMS:
        raise CompilerError(f"no Triton kernel: {_failed.get(module, f'{programs} programs are too many')}")
    like: Tensor = given[0]
    try:
        function = getattr(importlib.import_module(module), kernel)[(programs,)]
        options = {"num_warps": warps, "enable_fp_fusion": True, **constants}
        if like.device.type != "cuda" or like.device.index == torch.cuda.current_device():
            function(*given, **options)
        else:
            with torch.cuda.device(like.device):
                function(*given, **options)
    except Exception as error:  # of Triton's compiler, of a missing C compiler for its launcher, of the driver
        _failed[module] = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CompilerError(f"no Triton kernel: {_failed[module]}") from error

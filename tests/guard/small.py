"""The small product that Inductor compiles as C++, compiled as C with a function to call."""

from __future__ import annotations

import ctypes
import tempfile
from array import array
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.backends.inductor.small_gemm_template import SOURCE
from amp_graph.passes.native import gemm_builds
from amp_graph.passes.native.jit_compiler import load

CALL = "\nvoid small_product(const Product *p) { multiply(p); }\n"


@lru_cache
def library() -> ctypes.CDLL:
    """Return the kernel with dot products where the CPU has them, else with plain loops."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / SOURCE.name
        source.write_text(SOURCE.read_text() + CALL)
        flags = gemm_builds.DOT_PRODUCTS if gemm_builds.cpu_has_bf16() else ("-DPLAIN_LOOPS",)
        found = load(source, flags)
    found.small_product.argtypes = (ctypes.c_char_p,)
    return found


def multiply_small(left: Tensor, right: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Return ``left @ right + bias`` as compiled graphs have it."""
    made = left.new_empty(left.shape[0], right.shape[1])
    pointers = (0 if t is None else t.data_ptr() for t in (left, right, bias, made))
    sizes = (*made.shape, left.shape[1], *left.stride(), *right.stride(), relu)
    library().small_product(array("q", (*pointers, *sizes)).tobytes())
    return made


assert torch.bfloat16.itemsize == 2, "what the kernel reads"

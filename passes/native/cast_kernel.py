"""Sum large CPU tensors of fp32, bf16 or fp16 in fp32, and zero them, with compiled C.

Before: ``a.float() + b``, which writes a cast. After: ``total_of((a, b))``: one pass over memory. What C cannot do
here, torch does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("cast_kernel.c")
LARGE = 1 << 18  # elements: below this size, caches keep the result until it is read
MOST_TERMS = 16


@lru_cache
def library(low: torch.dtype) -> ctypes.CDLL | None:
    """Return the library compiled for ``low``, bf16 or fp16; None where nothing can be compiled."""
    found = load_if_possible(SOURCE, MACROS[low])
    if found is not None:
        found.add_up.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return found


register_kernel("casts", lambda low: library(low))


def clear(made: Tensor) -> Tensor:
    """``made.zero_()`` of an fp32 tensor that autograd has not saved."""
    if made.dtype != torch.float32 or not _fits(made) or (found := library(torch.bfloat16)) is None:
        return made.zero_()
    _run(found.add_up, made, (), past=True)
    return made


def total_of(terms: Sequence[Tensor]) -> Tensor | None:
    """Return the fp32 sum of fp32 and low-precision ``terms`` of one shape in new memory; None where C cannot make it.

    Without autograd. Adds from first to last and rounds each sum to fp32, like successive additions in torch.
    """
    first, low = terms[0], next((t.dtype for t in terms if t.dtype in MACROS), torch.bfloat16)
    kinds = (low, torch.float32)
    if len(terms) > MOST_TERMS or any(t.shape != first.shape or t.dtype not in kinds for t in terms):
        return None
    if not _fits(*terms) or (found := library(low)) is None:
        return None
    made = torch.empty_like(first, dtype=torch.float32)
    _run(found.add_up, made, terms, past=False)
    return made


def _fits(*tensors: Tensor) -> bool:
    """Say whether all are large, of the same layout, and without gaps."""
    first = tensors[0]
    if first.numel() < LARGE or not is_dense(first):
        return False
    return all(t.device.type == "cpu" and not is_in_mode(t) and t.stride() == first.stride() for t in tensors)


def is_dense(t: Tensor) -> bool:
    """Say whether ``t`` has no gaps in memory, in any order of its dimensions."""
    if t.is_contiguous():
        return True
    beside = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != beside:
            return False
        beside *= size
    return True


def _run(function: ctypes._NamedFuncPointer, made: Tensor, terms: Sequence[Tensor], past: bool) -> None:
    count = made.numel()
    table = array("q", (count, past, len(terms), address_of(made)))
    for term in terms:
        table.extend((address_of(term), term.dtype != torch.float32))
    function(table.tobytes(), threads_for(count))

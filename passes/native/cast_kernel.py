"""Cast large CPU tensors between fp32 and bf16 or fp16, sum them in fp32, and zero them, with compiled C.

Before: ``grad.float()``, which reads its result's memory before it writes there.
After: ``widened(grad)``, with non-temporal stores: half the time, and the caches keep their content. What C cannot do
here, torch does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.native.jit_compiler import MACROS, load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import kernel
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("cast_kernel.c")
LARGE = 1 << 18  # elements: below this size, caches keep the result until it is read
LARGE_OF_PLACES = 1 << 14  # for weights that change their layout, where torch goes element by element
MOST_TERMS, MOST_PLACES = 16, 64


@kernel("casts")
def library(low: torch.dtype) -> ctypes.CDLL | None:
    """Return the library compiled for ``low``, bf16 or fp16; None where nothing can be compiled."""
    found = load_if_possible(SOURCE, MACROS[low])
    if found is not None:
        for function in (found.add_up, found.round_off, found.channels_first, found.channels_last):
            function.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return found


def copy_into(made: Tensor, source: Tensor) -> Tensor:
    """``made.copy_(source)`` between fp32 and low precision, without autograd, for a ``made`` that is not read soon."""
    wide, low = (source, made) if source.dtype == torch.float32 else (made, source)
    is_cast = wide.dtype == torch.float32 and low.dtype in MACROS
    if is_cast and _lays_out(made, source):
        return made
    if not is_cast or made.shape != source.shape or not _fits(made, source) or (found := library(low.dtype)) is None:
        return made.copy_(source)
    _run(found.add_up if wide is made else found.round_off, made, (source,), past=True)
    return made


def widened(low: Tensor, like: Tensor) -> Tensor:
    """``low.float()`` without autograd, in new memory with the layout of ``like``, for results not read soon."""
    return copy_into(torch.empty_strided(low.shape, like.stride(), dtype=torch.float32), low)


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


def is_last(weight: Tensor) -> bool:
    """Say whether a convolution's weight is channels_last, and not contiguous as well."""
    return weight.dim() == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _lays_out(made: Tensor, source: Tensor) -> bool:
    """Cast a convolution's weight into channels_last, or its gradient out of it, if C can; say whether it did."""
    if made.dim() != 4 or made.shape != source.shape or made.numel() < LARGE_OF_PLACES or made.is_sparse:
        return False
    first, last = (source, made) if made.dtype != torch.float32 else (made, source)
    outputs, channels, *kernel = made.shape
    places = kernel[0] * kernel[1]
    lie = first.is_contiguous() and is_last(last)
    if not lie or places > MOST_PLACES or any(t.device.type != "cpu" or is_in_mode(t) for t in (made, source)):
        return False
    found = library(last.dtype)
    if found is None:
        return False
    from_low, threads = source.dtype != torch.float32, threads_for(made.numel())
    table = array("q", (outputs, channels, places, address_of(source), from_low, address_of(made)))
    (found.channels_first if made is first else found.channels_last)(table.tobytes(), threads)
    return True


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

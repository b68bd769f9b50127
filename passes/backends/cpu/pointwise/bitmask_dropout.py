"""CPU dropout for converted graphs: the draws of torch's generator, of which one bit per element is saved.

Before: ``dropout(x, 0.1)``: a double drawn per element, 5 ns on any number of threads, and noise of the size of ``x``
that is stored, divided, multiplied by and saved.
After: ``dropout_in_bits(x, 0.1)``: the same draws, vectorized, and one bit saved per element. Bit for bit torch's:
values, gradients and the generator's next draws.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.memory.huge_pages import empty_like
from amp_graph.passes.native.cast_kernel import is_dense
from amp_graph.passes.native.jit_compiler import MACROS, load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.dispatch import is_seen
from amp_graph.passes.torch_compat.double_backward import is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.storage import address_of

SOURCE = Path(__file__).with_name("dropout_kernel.c")
STATE = 5056  # bytes of what ``torch.Generator.get_state`` returns; 2.11 - 2.13
PADDING = 16  # padding bytes after the bits, some of which are read with the last
_drawing = [threading.Lock()]  # two threads do not draw the same numbers
if hasattr(os, "register_at_fork"):  # a forked child has no other thread, which may have held it
    os.register_at_fork(after_in_child=lambda: _drawing.__setitem__(0, threading.Lock()))


@lru_cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernel for ``dtype``; None where nothing can be compiled, or torch draws differently."""
    if dtype not in (torch.float32, *MACROS):
        return None
    found = load_if_possible(SOURCE, MACROS.get(dtype, ()))
    if found is not None:
        found.draw.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p)
        found.scale_low.argtypes = found.scale_full.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return found if found is not None and _draws_as_torch(found) else None


register_kernel("dropout", lambda low: library(low))


def _draws_as_torch(found: ctypes.CDLL) -> bool:
    """Say whether draws equal those of this torch build, which uses others for some CPUs (MKL's, on Intel's)."""
    with torch.inference_mode(False), torch.no_grad():
        theirs, ours = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
        if ours.get_state().numel() != STATE:
            return False
        for count in (1001, 4099):  # through several refills of the state, starting in the middle of one
            drawn = torch.empty(count, device="cpu").bernoulli_(0.7, generator=theirs).to(torch.bool)
            if not torch.equal(drawn, kept_of(_drawn(found, count, 0.7, ours), count)):
                return False
        return torch.equal(theirs.get_state(), ours.get_state())


def _drawn(found: ctypes.CDLL, count: int, p: float, generator: torch.Generator) -> Tensor:
    """Return which of ``count`` elements are kept with probability ``p``: bits, uint8 [count / 8], and padding."""
    kept = torch.zeros(-(-count // 8) + PADDING, dtype=torch.uint8, device="cpu")
    with _drawing[0]:
        state = generator.get_state()
        found.draw(address_of(state), math.ceil(p * 2.0**53), count, address_of(kept))
        generator.set_state(state)
    return kept


def kept_of(bits: Tensor, count: int) -> Tensor:
    """Return ``count`` bits as booleans: bool [count]."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> places & 1).flatten()[:count].to(torch.bool)


@lru_cache(maxsize=256)
def _scale_of(p: float, dtype: torch.dtype) -> float:
    """Return torch's noise for a kept element: 1 / (1 - p), rounded to ``dtype``."""
    with torch.inference_mode(False), torch.no_grad():
        return float(torch.ones(1, dtype=dtype, device="cpu").div_(1 - p))


def dropout_bits(x: Tensor, p: float, keys: int = 1) -> Tensor:
    """Return which elements of ``x``, in memory order, a dropout of ``p`` keeps: bits, and padding: uint8.

    ``keys``: this many bits per element, as for attention probabilities, of a contiguous [*x.shape, keys].
    """
    found = library(x.dtype)
    assert found is not None, "asked where there is a kernel"
    return _drawn(found, x.numel() * keys, 1 - p, torch.default_generator)


def scaled_by_bits(x: Tensor, bits: Tensor, p: float) -> Tensor:
    """Return ``x``, which is dense, times the noise of ``bits``, in its layout."""
    found = library(x.dtype)
    assert found is not None, "asked where there is a kernel"
    x = x if is_dense(x) else torch.empty_like(x).copy_(x)
    made, count = empty_like(x), x.numel()
    work = struct.pack("qqqqf", count, address_of(x), address_of(made), address_of(bits), _scale_of(p, x.dtype))
    (found.scale_full if x.dtype == torch.float32 else found.scale_low)(work, threads_for(count))
    return made


class _InBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        if not is_dense(x):
            x = torch.empty_like(x).copy_(x)  # in the layout of torch's noise
        calls = _calls(x)
        bits = calls.dropout_bits(x, p)
        ctx.save_for_backward(bits)
        ctx.p, ctx.form = p, (x.shape, x.stride())
        found: Tensor = calls.scaled_by_bits(x, bits, p)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        shape, strides = ctx.form
        if is_plain(grad):
            ones = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device).fill_(1)
            return grad * _calls(ones).scaled_by_bits(ones, bits, ctx.p), None
        if grad.stride() != strides:
            grad = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return _calls(grad).scaled_by_bits(grad, bits, ctx.p), None


def _calls(x: Tensor) -> Any:
    """Return the two functions: as operators, if a tracer or a profiler observes them."""
    return OPS if is_seen(x) else sys.modules[__name__]


def dropout_in_bits(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``F.dropout`` in training, not in place, on the CPU. Under transforms, torch's own."""
    if leaves_to_torch(input):
        return F.dropout(input, p, training)
    found: Tensor = _InBits.apply(input, p)
    return found


define_as_typed(
    dropout_bits,
    lambda x, keys: x.new_empty(-(-x.numel() * keys // 8) + PADDING, dtype=torch.uint8),
    (torch.Tag.nondeterministic_seeded,),
)
define_as_typed(scaled_by_bits, lambda x: torch.empty_like(x))

"""Fake tensors, symbolic sizes and tracing by torch.fx: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher  # 2.11 - 2.13
from torch._guards import tracing as tracing  # 2.11 - 2.13: tracing(None) hides Dynamo's own context
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # 2.11 - 2.13
    DynamicOutputShapeException,  # 2.11 - 2.13
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # 2.11 - 2.13
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # 2.11 - 2.13
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # 2.11 - 2.13
from torch.fx import _symbolic_trace  # 2.11 - 2.13
from torch.fx.experimental.proxy_tensor import make_fx as make_fx  # 2.11 - 2.13
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # 2.11 - 2.13
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free_unbacked_symbols  # 2.11 - 2.13
from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true  # 2.11 - 2.13
from torch.utils._python_dispatch import _disable_current_modes

from amp_graph.passes.torch_compat import torch_version

outside_modes = _disable_current_modes  # 2.11 - 2.13: no tracer, no fake tensors

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Errors of an operation on fake tensors that needs the data.
DEPENDS_ON_DATA = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


@functools.cache  # once in a process
def keep_guard_of_missing_gpu() -> None:
    """Let threads that end enter fake-tensor modes where there is no GPU; goes with torch 2.12.

    There the first thread to enter one owns a substitute for CUDA's device guard. The substitute goes with its thread,
    and the next mode that is entered in another thread crashes the process.
    """
    substitute = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if substitute is None or torch_version() >= (2, 13) or torch.cuda.is_available():
        return
    if threading.current_thread() is threading.main_thread():
        substitute()
        return
    is_set = threading.Event()

    def set_and_stay() -> None:
        substitute()
        is_set.set()
        threading.Event().wait()

    threading.Thread(target=set_and_stay, name="amp_graph keeps a device guard", daemon=True).start()
    is_set.wait()


@contextlib.contextmanager
def tracing_fake(mode: FakeTensorMode, *, symbolic: bool = True) -> Iterator[None]:
    """Run under ``mode`` outside Dynamo's tracing context and without adding guards on symbolic sizes.

    Data-dependent sizes become new symbols here, which Dynamo must not look for in its graph. ``symbolic``: use the
    Python dispatcher, as Dynamo does, because C++ kernels reject symbolic sizes. It decomposes some composites
    differently from the C++ code that will run.
    """
    shape_env = mode.shape_env
    guards = shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext()
    symbols = shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()
    python = enable_python_dispatcher() if symbolic else contextlib.nullcontext()
    with tracing(None), guards, symbols, python, without_cast_cache(), mode:
        yield


@contextlib.contextmanager
def without_cast_cache() -> Iterator[None]:
    """Keep operators that Python dispatches, holding the GIL, from autocast's cache of weight casts.

    Autocast would wait for the lock of its cache. A thread that leaves autocast holds that lock and needs the GIL to
    free the cache: a deadlock, as in pytorch/pytorch#119262.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def dispatch_for_data(by_data: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the dispatch for a trace: torch's Python rules if sizes depend on data, which the C++ rules reject."""
    return enable_python_dispatcher() if by_data else contextlib.nullcontext()


UNKNOWN = 4  # number for a size of which nothing is known
LARGEST = 2**31  # torch's bound for an unbounded size: a little less than 2 ** 63


def _at_most(known: Any) -> int:
    """Return the upper bound of a range of sizes, if it has a useful one; 2.11 - 2.13."""
    upper = known.upper if known is not None else None
    return int(upper) if upper is not None and upper.is_finite and 0 < upper < LARGEST else UNKNOWN


def concrete_size(size: Any) -> int:
    """Return a number for a symbolic size: its hint, or one for each symbol that has none.

    That is the symbol's upper bound, as for rows that a mask selects, or 4 if there is no bound.
    """
    if isinstance(size, torch.SymInt):
        if size.node.is_nested_int():  # the ragged dimension of a nested tensor
            return 4
        if size.node.hint is not None:
            return int(size.node.hint)
        expression, ranges = size.node.expr, size.node.shape_env.var_to_range
        found = expression.subs({symbol: _at_most(ranges.get(symbol)) for symbol in expression.free_symbols})
        return int(found) if found.is_number and found.is_finite else UNKNOWN
    return int(size)


def concrete_number(number: Any) -> int | float | bool:
    """Return a number for a symbolic one: a size as ``concrete_size`` has it, 1.0 or True for others."""
    if isinstance(number, torch.SymFloat):
        return 1.0
    return True if isinstance(number, torch.SymBool) else concrete_size(number)


def fake_of(mode: FakeTensorMode, device: torch.device, make: Callable[[], torch.Tensor]) -> FakeTensor:
    """Return the meta tensor that ``make`` makes as a fake tensor of ``mode``; 2.11 - 2.13.

    As the mode makes one, in a tenth of the time.
    """
    with unset_fake_temporarily():
        return FakeTensor(mode, make(), device)


def empty_meta(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty meta tensor with the sizes and strides of ``like``."""
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")


def empty_of_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the same kind in the mode in force, with numbers for symbolic sizes and strides."""
    sizes, strides = [[concrete_size(n) for n in numbers] for numbers in (tensor.shape, tensor.stride())]
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements of a fake tensor, with a number for each symbolic size."""
    return math.prod(map(concrete_size, tensor.shape))


def refused_under_fx(error: RuntimeError) -> bool:
    """Say whether Dynamo refused a call in ``torch.fx.symbolic_trace`` or ``make_fx``; eval_frame.py, 2.11 - 2.13."""
    return "FX to symbolically trace" in str(error)


def wait_for_traces_of_others() -> bool:
    """Wait until no other thread traces with torch.fx, whose flag is global; False if this thread does.

    torch/fx/_symbolic_trace.py, 2.11 - 2.13.
    """
    trace = _symbolic_trace.Tracer.trace.__code__
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is trace:
            return False
        frame = frame.f_back
    while _symbolic_trace._is_fx_tracing_flag:
        time.sleep(1e-3)
    return True


def same(one: Any, other: Any) -> bool:
    """Say whether two numbers, or two shapes, are known to be equal for all values of their symbols."""
    if isinstance(one, (tuple, list)) or isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is int and type(other) is int:
        return bool(one == other)
    return statically_known_true(one == other)


def is_number(*sizes: Any) -> bool:
    """Say whether all ``sizes`` are numbers, not symbols."""
    return all(type(size) is int for size in sizes)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are known to have the same shape, dtype and strides."""
    return one.dtype == other.dtype and same(one.shape, other.shape) and same(one.stride(), other.stride())


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is known to be contiguous."""
    if is_number(*tensor.shape, *tensor.stride()):
        return tensor.is_contiguous()
    step: Any = 1
    filled: Any = 1  # torch counts a size of 0 as 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not same(size, 1):
            if not same(stride, step) and not same(stride, filled):
                return False
            step, filled = step * size, filled * torch.sym_max(1, size)
    return True


def depends_on_data(val: Any) -> bool:
    """Say whether a size in a node's value, or its number, is known only after the operation has run."""
    return any(bool(free_unbacked_symbols(number)) for number in _symbols(val))


def _symbols(val: Any) -> Iterator[Any]:
    if isinstance(val, torch.Tensor):
        yield from (n for n in val.shape if not is_number(n))
        if val.layout is torch.strided:
            yield from (n for n in val.stride() if not is_number(n))
    elif isinstance(val, SYMBOLIC):
        yield val
    elif isinstance(val, (tuple, list)):
        for part in val:
            yield from _symbols(part)


def with_sizes_of(fresh: Any, known: Any) -> Any:
    """Return ``fresh``, a recomputed node value, with the data-dependent sizes of the ``known`` one.

    A recomputed value gets new symbols for such sizes, which nothing else in the graph has.
    """
    if isinstance(fresh, (tuple, list)) and isinstance(known, (tuple, list)) and len(fresh) == len(known):
        parts = [with_sizes_of(a, b) for a, b in zip(fresh, known, strict=True)]
        return type(fresh)(*parts) if hasattr(fresh, "_fields") else type(fresh)(parts)
    if isinstance(fresh, SYMBOLIC):
        return known if type(known) is type(fresh) else fresh
    if not isinstance(fresh, FakeTensor) or not isinstance(known, FakeTensor) or not _is_renamed(fresh, known):
        return fresh
    with fresh.fake_mode:
        return torch.empty_strided(known.shape, known.stride(), dtype=fresh.dtype, device=fresh.device)


def _is_renamed(fresh: torch.Tensor, known: torch.Tensor) -> bool:
    if fresh.dim() != known.dim() or fresh.layout is not torch.strided or known.layout is not torch.strided:
        return False
    return _unbacked(fresh) != _unbacked(known)


def _unbacked(tensor: torch.Tensor) -> set[Any]:
    return {symbol for number in _symbols(tensor) for symbol in free_unbacked_symbols(number)}

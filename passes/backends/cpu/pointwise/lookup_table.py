"""bf16 activations on the CPU by tables of all 65,536 values, with their gradients, in compiled C.

Before: ``F.gelu(x, approximate="tanh")``, which upcasts each element and computes a hyperbolic tangent.
After: ``gelu_by_table(x, "tanh")``: looks up what torch computes and rounds for each bf16 value, once per process. The
same bits in a half to a sixteenth of the time; the gradient is the incoming one times a slope in fp32, rounded once.

Torch's GELU of channels_last images is another library's, and differs by one rounding in some 10,000 elements.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.memory.huge_pages import empty_like
from amp_graph.passes.native.cast_kernel import is_dense
from amp_graph.passes.native.jit_compiler import load_if_possible, threads_for
from amp_graph.passes.native.kernel_table import register_kernel
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_batched, is_in_mode, is_seen
from amp_graph.passes.torch_compat.double_backward import leaves_to_torch
from amp_graph.passes.torch_compat.storage import address_of

own_functions(__name__)

ATEN: Any = torch.ops.aten
SOURCE = Path(__file__).with_name("lookup_table_kernel.c")


class Form(NamedTuple):
    """An elementwise function, and its gradient.

    ``twice``: the gradient is differentiable itself. ``rounds``: it is computed in bf16 even where fp32 is possible.
    """

    function: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    twice: bool = False
    rounds: bool = False


# By name, as in torch; passes add those of users.
FORMS: dict[str, Form] = {
    "gelu": Form(F.gelu, ATEN.gelu_backward),
    "gelu by tanh": Form(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: ATEN.gelu_backward(grad, x, approximate="tanh"),
    ),
    "silu": Form(F.silu, ATEN.silu_backward),
    "mish": Form(F.mish, ATEN.mish_backward),
}


@lru_cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None where nothing can be compiled."""
    found = load_if_possible(SOURCE)
    if found is not None:
        found.look_up.argtypes = found.times_slope.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    return found


register_kernel("lookup_table", lambda _: library())


@lru_cache
def _values(form: str) -> Tensor:
    """Return ``form`` of each bf16 value, indexed by its bits: bf16 [65,536], and two more, because pairs are read."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.cat([FORMS[form][0](numbers := _numbers()), numbers[:2]])


@lru_cache
def _slopes(form: str) -> Tensor:
    """Return the slope of ``form`` at each bf16 value, indexed by its bits: fp32 [65,536]."""
    with torch.inference_mode(False), torch.no_grad():
        numbers = _numbers() if FORMS[form].rounds else _numbers().float()
        return FORMS[form].gradient(torch.ones_like(numbers), numbers).float()


def _numbers() -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)


def activation_by_table(x: Tensor, form: str) -> Tensor:
    """Return ``form`` of each element of ``x``, bf16 on the CPU, in its layout."""
    found = library()
    if found is None or not _has_memory(x):
        return FORMS[form][0](x)
    x = x if is_dense(x) else x.contiguous()
    made, count = empty_like(x), x.numel()
    table = array("q", (count, address_of(x), 0, address_of(_values(form)), address_of(made)))
    found.look_up(table.tobytes(), threads_for(count))
    return made


def gradient_by_table(grad: Tensor, x: Tensor, form: str) -> Tensor:
    """Return ``grad`` times the slope of ``form`` at ``x``, both bf16 and of one shape, in the layout of ``x``."""
    found = library()
    if found is None or not (_has_memory(x) and _has_memory(grad)):
        return FORMS[form][1](grad, x)
    x = x if is_dense(x) else x.contiguous()
    made, count = empty_like(x), x.numel()
    if grad.stride() != x.stride():
        grad = torch.empty_like(x).copy_(grad)
    table = array("q", (count, address_of(x), address_of(grad), address_of(_slopes(form)), address_of(made)))
    found.times_slope(table.tobytes(), threads_for(count))
    return made


def _has_memory(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not is_in_mode(x)


class _ByTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.form = form
        return value_of(x, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        function, gradient, twice, _ = FORMS[ctx.form]
        if twice and torch.is_grad_enabled():
            return gradient(grad, x), None
        if torch.is_grad_enabled():  # create_graph=True: not all of torch's gradients have one themselves
            (found,) = torch.autograd.grad(function(x), x, grad, create_graph=True)
            return found, None
        if is_batched(grad):  # is_grads_batched=True
            return gradient(grad, x), None
        if is_seen(x):
            return OPS.gradient_by_table(grad, x, ctx.form), None
        return gradient_by_table(grad, x, ctx.form), None


def value_of(x: Tensor, form: str) -> Tensor:
    """Return ``form`` of ``x`` without gradients: directly, or as one operator if a tracer or profiler observes it."""
    if is_seen(x):
        found: Tensor = OPS.activation_by_table(x, form)
        return found
    return activation_by_table(x, form)


def activated(x: Tensor, form: str) -> Tensor:
    """Return ``form`` of ``x``; torch's own under transforms and for tensors without readable memory."""
    if leaves_to_torch(x):
        return FORMS[form][0](x)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return value_of(x, form)
    found: Tensor = _ByTable.apply(x, form)
    return found


def gelu_by_table(input: Tensor, approximate: str = "none") -> Tensor:
    """``F.gelu``, bit for bit."""
    return activated(input, "gelu by tanh" if approximate == "tanh" else "gelu")


def silu_by_table(input: Tensor, inplace: bool = False) -> Tensor:
    """``F.silu``, not in place; the gradient is rounded once, as torch's."""
    return activated(input, "silu")


def mish_by_table(input: Tensor, inplace: bool = False) -> Tensor:
    """``F.mish``, likewise."""
    return activated(input, "mish")


define_as_typed(activation_by_table, lambda x: torch.empty_like(x))
define_as_typed(gradient_by_table, lambda x: torch.empty_like(x))

"""The dispatcher, its modes and its transforms: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator  # 2.11 - 2.13
from torch._ops import OpOverload as OpOverload  # 2.11 - 2.13
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast  # 2.11 - 2.13
from torch.utils._python_dispatch import (  # 2.11 - 2.13
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_any_mode_without_ignore_compile_internals,
    is_traceable_wrapper_subclass,
)

from amp_graph.passes.torch_compat import torch_version

# Tensor types without a subclass's own handling.
PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast  # of a graph's regions
SET_GRAD: Any = torch._C._set_grad_enabled  # what a graph calls at both ends of ``no_grad``; 2.11 - 2.13


def dispatched(operator: Any) -> Callable[..., Any]:
    """Return the dispatcher's function of an operator overload, all that calling the overload calls. 2.11 - 2.13."""
    plain = type(operator) is OpOverload
    found: Callable[..., Any] = getattr(operator, "_op", operator) if plain else operator
    return found


def dispatch_has_kernel(op: Any, key: str) -> bool:
    """Say whether ``op``, an overload, has a kernel registered for the dispatch key named ``key``."""
    return bool(op.has_kernel_for_dispatch_key(key))


# Looked up once, because every call of a converted model asks; 2.11 - 2.13.
_jit: Any = torch.jit  # exports its names, but not explicitly
is_tracing: Callable[[], bool] = _jit.is_tracing
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # of ``torch.func``


def being_traced() -> bool:
    """Say whether ``torch.jit.trace`` or ``torch.export`` is recording the current call."""
    return is_tracing() or torch.compiler.is_exporting()


def is_batched(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is a batch of tensors under ``vmap``, which in-place operations may not broadcast."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def in_forward_mode() -> bool:
    """Say whether forward-mode differentiation is on, which custom autograd functions do not support."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether ``torch.autocast`` is active on any device, ten times as fast as asking for two devices; 2.11 - 2.13.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def in_transform() -> bool:
    """Say whether a ``torch.func`` transform is running: Dynamo captures nothing inside, and never again there."""
    return innermost_transform() is not None


# How many dispatch modes are active, the user's own among them, in one C call; 2.11 - 2.13.
has_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def mode_without_capture() -> str:
    """Return the name of an active user dispatch mode, under which Dynamo does not capture; "" for none.

    FLOP counters and memory trackers are such modes. Dynamo would skip the frames that it meets there for good.
    """
    if not is_in_any_mode_without_ignore_compile_internals():
        return ""
    modes = _get_current_dispatch_mode_stack()
    return type(modes[-1]).__name__ if modes else ""


def is_seen(tensor: torch.Tensor) -> bool:
    """Say whether a tracer, a counter or a profiler observes the operators that are called on ``tensor``."""
    return torch._C._autograd._profiler_enabled() or is_in_mode(tensor)


def is_in_mode(tensor: torch.Tensor) -> bool:
    """Say whether operators on ``tensor`` go to a mode that need not compute them: a tracer, a counter."""
    return type(tensor) not in PLAIN or torch._C._len_torch_dispatch_stack() > 0


def is_wrapper(given: Any) -> bool:
    """Say whether ``given`` is a tensor that wraps others, which only torch's own operations can handle."""
    return type(given) not in PLAIN and is_traceable_wrapper_subclass(given)


# Goes with torch 2.12: each transform of functorch, as its interpreter calls it, and what leaves it.
_LEAVE = {
    "Vmap": "_vmap_decrement_nesting",
    "Grad": "_grad_decrement_nesting",
    "Jvp": "_jvp_decrement_nesting",
    "Functionalize": "_func_decrement_nesting",
}


def _leave_transforms(depth: int) -> None:
    """Leave functorch's transforms (``vmap``, ``grad``) that are on, down to ``depth``; 2.11 - 2.13.

    Goes with torch 2.12: in 2.11, torch's own function for it leaves one too many, or fails where there is none left.
    """
    functorch: Any = torch._C._functorch
    if torch_version() >= (2, 13):
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        return
    while functorch.get_dynamic_layer_stack_depth() > depth:
        getattr(functorch, _LEAVE[functorch.peek_interpreter_stack().key().name])()


class ModesOfThread:
    """The current modes of this thread that a graph may switch, to be restored if the graph raises; 2.11 - 2.13.

    A graph holds both ends of the user's regions (``no_grad``, ``autocast``, ``vmap``) as nodes: an exception between
    them leaves the mode on.
    """

    def __init__(self) -> None:
        """Read the modes."""
        self.grad = torch.is_grad_enabled()
        self.autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
        self.is_caching = torch.is_autocast_cache_enabled()
        self.regions = _open_autocast_regions()
        self.depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self.no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self) -> None:
        """Restore the modes."""
        _leave_transforms(self.depth)
        for device, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.is_caching)
        while _open_autocast_regions() > self.regions:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        torch.set_grad_enabled(self.grad)
        if self.no_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(self.no_hooks)


def _open_autocast_regions() -> int:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1

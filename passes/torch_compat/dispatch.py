"""The dispatcher, its modes and its transforms: private names of torch.

Each with the versions of torch that it was checked on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator as HigherOrderOperator  # 2.11 - 2.13
from torch._ops import OpOverload as OpOverload  # 2.11 - 2.13
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.11 - 2.13

# Tensors that no subclass looks after.
PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def dispatch_has_kernel(op: OpOverload, key: str) -> bool:
    """Say whether ``op`` has a kernel registered for the dispatch key named ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def dispatched(operator: Any) -> Callable[..., Any]:
    """Return the dispatcher's function of an operator overload, which is all that calling that calls. 2.11 - 2.13."""
    plain = type(operator) is torch._ops.OpOverload
    found: Callable[..., Any] = getattr(operator, "_op", operator) if plain else operator
    return found


# Looked up once: every call of a converted model asks; 2.11 - 2.13.
_tracing_state, _compiler = torch._C._get_tracing_state, torch.compiler


def being_traced() -> bool:
    """Say whether ``torch.jit.trace`` or ``torch.export`` is recording what is called now."""
    return _tracing_state() is not None or _compiler._is_exporting_flag


def is_batched(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` is a batch of tensors under ``vmap``, which in-place operations may not widen."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def in_forward_mode() -> bool:
    """Say whether forward-mode differentiation is on, which functions with a backward of their own do not know."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether ``torch.autocast`` is in force on any device, in a tenth of the time of asking two of them; 2.11 - 2.13.
is_autocast_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def in_transform() -> bool:
    """Say whether a transform of ``torch.func`` is running: Dynamo captures nothing inside, and never again there."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mode_without_capture() -> str:
    """Return the name of a dispatch mode that a user has switched on, under which Dynamo captures nothing; "" for none.

    FLOP counters and memory trackers are such modes. Dynamo would give up the frames that it meets there for good.
    """
    if not torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals():
        return ""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return type(modes[-1]).__name__ if modes else ""


def is_seen(tensor: torch.Tensor) -> bool:
    """Say whether somebody is to see the operators that are called on ``tensor``: a tracer, a counter, a profiler."""
    return torch._C._autograd._profiler_enabled() or is_in_mode(tensor)


def is_in_mode(tensor: torch.Tensor) -> bool:
    """Say whether what is called on ``tensor`` goes to somebody who need not compute it: a tracer, a counter."""
    return type(tensor) not in PLAIN or torch._C._len_torch_dispatch_stack() > 0


def is_recorded(tensor: torch.Tensor) -> bool:
    """Say whether what is called on ``tensor`` becomes a graph; not where somebody counts it; 2.11 - 2.13."""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return type(tensor) not in PLAIN or proxy is not None


def is_wrapper(given: Any) -> bool:
    """Say whether ``given`` is a tensor that stands for others, which only torch's own operations know to handle."""
    return type(given) not in PLAIN and is_traceable_wrapper_subclass(given)


class ModesOfThread:
    """Modes of this thread that a graph may switch, as they are now, to restore where the graph raises; 2.11 - 2.13.

    A graph holds both ends of the user's regions (``no_grad``, ``autocast``, ``vmap``) as nodes: what raises between
    them leaves the mode on.
    """

    def __init__(self) -> None:
        """Read them."""
        self.grad = torch.is_grad_enabled()
        self.autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
        self.is_caching = torch.is_autocast_cache_enabled()
        self.regions = _open_autocast_regions()
        self.depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self.no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()

    def restore(self) -> None:
        """Switch them back."""
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(self.depth)
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

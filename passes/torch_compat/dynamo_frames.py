"""Frames that Dynamo compiled, and functions that it skips: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

_SERIAL = itertools.count()


def own_code_object(function: types.FunctionType) -> types.FunctionType:
    """Return ``function`` with a code object of its own.

    Dynamo's cache belongs to the code object, which every closure of one ``def`` shares: without this, models converted
    one after the other fill each other's cache.
    """
    # The name is part of the key under which Dynamo remembers which sizes have changed.
    name = f"{function.__name__}_{next(_SERIAL)}"
    return types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def is_whole(compiled: types.CodeType) -> bool:
    """Say whether code that Dynamo made calls one graph, and no code behind a graph break."""
    graphs = [name for name in compiled.co_names if name.startswith("__compiled_fn")]
    return len(graphs) == 1 and not any("resume" in name for name in compiled.co_names)


def has_compiled(code: types.CodeType) -> bool:
    """Say whether Dynamo has compiled code for ``code``; 2.11 - 2.13."""
    return bool(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method without keeping its object alive.

    Dynamo's compiled code stays in a module's globals as long as the code object of the captured function: if it
    referenced that function's owner, neither would ever be freed.
    """
    bound = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = bound()
        assert found is not None, "a captured graph outlived its owner, through which alone it is called"
        return found(*args, **kwargs)

    return call


dynamo_listens = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None without a compiler; 2.11 - 2.13


def outside_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an outer ``torch.compile`` out of ``function``; return a runner of it, and of its calls, without Dynamo.

    ``function`` still captures itself as usual: the outer compiler would otherwise inline it. ``function`` is marked,
    not wrapped, because an extra call is measurable in small models: it has to call the runner where ``dynamo_listens``
    is not None, which then calls it again with Dynamo off.
    """
    disabled = torch._dynamo.disable(function, reason="a converted model captures itself, as a graph of its own")
    vars(function).update({k: v for k, v in vars(disabled).items() if k.startswith("_torchdynamo_disable")})
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return disabled


def undisabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that ``torch._dynamo.disable`` wrapped as ``function``, for callers with Dynamo off."""
    found: Callable[..., Any] = torch._dynamo.eval_frame.innermost_fn(function)
    return found


def tensor_guard(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return one fast C++ check of whether a tensor is like ``tensor``, a plain one; 2.11 - 2.13.

    Compares type, dtype, device, sizes, strides, and dispatch state: autocast on its kind of device, tracing, functorch
    transforms, dispatch modes, inference mode. Must not be given a nested tensor of the strided layout: it has no
    strides, and the error ends the process.
    """
    guard_of: Any = torch._C._dynamo.guards.TensorGuards  # its stub names other arguments
    guard = guard_of(tensor, dynamic_dims_sizes=[list(tensor.shape)], dynamic_dims_strides=[list(tensor.stride())])
    check: Callable[[torch.Tensor], bool] = guard.check
    return check


def compiled_in_place(module: torch.nn.Module) -> bool:
    """Say whether ``nn.Module.compile`` installed a compiled call on ``module``."""
    return module.__dict__.get("_compiled_call_impl") is not None

"""Frames that Dynamo compiled, and functions that it skips: private names of torch.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

import contextvars
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import config as dynamo_config  # 2.11 - 2.13


def never_compiled(function: Callable[..., Any]) -> None:
    """Let Dynamo run ``function``, and what it calls, uncompiled where they are not traced into; 2.11 - 2.13."""
    kinds: Any = torch._dynamo.types
    dynamo: Any = torch._dynamo.eval_frame
    code: types.CodeType = function.__code__
    dynamo.set_code_exec_strategy(code, kinds.FrameExecStrategy(kinds.FrameAction.SKIP, kinds.FrameAction.SKIP))


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


Find = Callable[[dict[str, Any]], Callable[..., Any] | None]


class _Entry:
    """What runs one of Dynamo's cache entries directly: references to its guards and code, and the code's globals.

    ``space`` is None if the code is no whole frame. Everything goes when Dynamo drops the entry, and so its code.
    """

    __slots__ = ("__weakref__", "code", "guards", "space")

    def __init__(self, guards: Any, compiled: types.CodeType, space: dict[str, Any]) -> None:
        self.space = _calling_directly(compiled, space) if is_whole(compiled) else None
        own = weakref.ref(self)

        def forget(_: Any) -> None:
            if (found := own()) is not None:
                found.space = None

        self.guards = weakref.ref(guards)
        self.code = weakref.ref(compiled, forget)


def _calling_directly(compiled: types.CodeType, space: dict[str, Any]) -> dict[str, Any]:
    """Return ``space`` with the graph's function itself, without the wrapper in which Dynamo is off: 1 us a call."""
    found = dict(space)
    for name in compiled.co_names:
        if name.startswith("__compiled_fn"):
            found[name] = getattr(space[name], "_torchdynamo_orig_callable", space[name])
    return found


def compiled_frames(function: types.FunctionType, *, has_backward: bool = True) -> Find:
    """Return a function that finds Dynamo's code for ``function``, for locals that pass its guards, else None.

    Running that code is what Dynamo's wrapper does in the end, after as much time as a small model's forward takes.
    Only whole frames are found: code behind a graph break must run under the wrapper. ``find({name: value})`` needs all
    arguments and free variables. It finds nothing while ``torch.compiler.set_stance`` is active, or, if
    ``has_backward``, compiled autograd. The guards that held last are checked first, without a look at the other
    entries: Dynamo takes ``cache_entry`` from the guards of an entry that it drops. 2.13.
    """
    frame, code = torch._dynamo.eval_frame, function.__code__
    calls = torch._dynamo.mutation_guard.GenerationTracker
    entries: Any = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    switch: Any = torch._C  # torch functions
    has_functions = switch._is_torch_function_enabled
    compiles_autograd = _reader_of("compiled_autograd")
    known: dict[int, _Entry] = {}
    last: _Entry | None = None

    def entry_of(entry: Any) -> _Entry:
        compiled, guards = entry.code, entry.guard_manager
        found = known.get(id(compiled))
        if found is None or found.code() is not compiled or found.guards() is not guards:
            for key in [key for key, one in known.items() if one.code() is None]:
                del known[key]
            found = known[id(compiled)] = _Entry(guards, compiled, function.__globals__)
        return found

    def fitting(local: dict[str, Any]) -> _Entry | None:
        nonlocal last
        if last is not None:
            guards = last.guards()
            if guards is not None and guards.cache_entry is not None and guards.root.check(local):
                return last
        for entry in entries(code):
            if entry.guard_manager.check(local):
                last = entry_of(entry)
                return last
        return None

    def find(local: dict[str, Any]) -> Callable[..., Any] | None:
        stance = frame._stance
        if stance.stance != "default" or stance.backend is not None:
            return None
        if has_backward and compiles_autograd() is True:
            return None
        before = None if has_functions() else switch._get_torch_function_state()
        try:
            found = fitting(local)
        except RuntimeError:  # the check disables torch functions, and if it raises, leaves them disabled
            switch._set_torch_function_state(switch._TorchFunctionState.ENABLED if before is None else before)
            raise
        space = None if found is None else found.space
        compiled = None if found is None or space is None else found.code()
        if space is None or compiled is None:
            return None
        calls.generation += 1  # CUDA graphs distinguish calls by it
        space = space if dynamo_listens() is None else function.__globals__
        return types.FunctionType(compiled, space, code.co_name, None, function.__closure__)

    return find if entries is not None and hasattr(frame, "_stance") else lambda local: None


def _reader_of(setting: str) -> Callable[[], Any]:
    """Return a fast reader of a Dynamo setting for this thread: through its module it takes 10 us per step, guards 40.

    Since 2.13, a setting is a context variable, which holds a sentinel of its own if nothing is set.
    """
    asked: Any = getattr(dynamo_config, "_config", {}).get(setting)
    given = getattr(asked, "user_override", None)
    if isinstance(given, contextvars.ContextVar) and not getattr(dynamo_config, setting):
        return given.get
    return lambda: getattr(dynamo_config, setting)


def is_whole(compiled: types.CodeType) -> bool:
    """Say whether code that Dynamo made calls one graph, and no code behind a graph break."""
    graphs = [name for name in compiled.co_names if name.startswith("__compiled_fn")]
    return len(graphs) == 1 and not any("resume" in name for name in compiled.co_names)


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


def not_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which Dynamo does not capture as a frame, but may still trace into from a caller."""
    code: types.CodeType = function.__code__
    torch._dynamo.eval_frame.skip_code(code)
    return function


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

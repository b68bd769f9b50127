"""The code that Dynamo compiled for a function, and the guards by which a call finds it: private names of torch.

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


# The code that Dynamo has compiled for a code object, with its guards; 2.11 - 2.13.
compiled_entries: Callable[[types.CodeType], list[Any]] = torch._C._dynamo.eval_frame._debug_get_cache_entry_list


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


def undisabled(function: Callable[..., Any]) -> Any:
    """Return the function that ``torch._dynamo.disable`` wrapped as ``function``, for callers with Dynamo off."""
    return torch._dynamo.eval_frame.innermost_fn(function)


def tensor_guard(tensor: torch.Tensor) -> Any:
    """Return one fast C++ check of whether a tensor is like ``tensor``, a plain one; 2.11 - 2.13.

    Compares type, dtype, device, sizes, strides, and dispatch state: autocast on its kind of device, tracing, functorch
    transforms, dispatch modes, inference mode. Must not be given a nested tensor of the strided layout: it has no
    strides, and the error ends the process.
    """
    guard_of: Any = torch._C._dynamo.guards.TensorGuards  # its stub names other arguments
    sizes, strides = [list(tensor.shape)], [list(tensor.stride())]
    return guard_of(tensor, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def compiled_in_place(module: torch.nn.Module) -> bool:
    """Say whether ``nn.Module.compile`` installed a compiled call on ``module``."""
    return module.__dict__.get("_compiled_call_impl") is not None


Find = Callable[[dict[str, Any]], Callable[..., Any] | None]
FAST_PATH = "fast_path"  # of a function that Dynamo calls for a graph: what returns the one that later calls may call

FRAMES: Any = torch._dynamo.eval_frame
CALLS: Any = torch._dynamo.mutation_guard.GenerationTracker  # CUDA graphs distinguish calls by it
_switch: Any = torch._C  # of torch functions


class Entry:
    """What runs one of Dynamo's cache entries directly: references to its guards and code, and the code's globals.

    ``space`` is None if the code is no whole frame. ``fast_path``: the code with what later calls of its graph may
    call, once that is known. Everything goes when Dynamo drops the entry, and so its guards and its code.

    A caller to whom a call of ``CompiledFrames.find`` takes too long may call ``fast_path`` without a compiler: where
    ``stance`` is current, autograd is not compiled, the guards still have their entry, and ``check(local)`` is true.
    """

    __slots__ = (
        "__weakref__",
        "check",
        "code",
        "compiles_autograd",
        "fast_path",
        "functions",
        "guards",
        "space",
        "stance",
    )  # fmt: skip

    def __init__(self, guards: Any, compiled: types.CodeType, space: dict[str, Any]) -> None:
        self.space = _calling_directly(compiled, space) if is_whole(compiled) else None
        self.fast_path: types.FunctionType | None = None
        self.check: Any = guards.root.check
        self.stance: Any = None
        self.compiles_autograd: Callable[[], Any] = bool
        self.functions: Any = None  # the state of torch functions in which its guards hold
        own = weakref.ref(self)

        def forget(_: Any) -> None:
            if (found := own()) is not None:
                found.space = found.fast_path = found.check = None

        self.guards = weakref.ref(guards, forget)
        self.code = weakref.ref(compiled, forget)

    def restore(self) -> bool:
        """Enable torch functions again after ``check``, which disables them meanwhile, has raised; return False."""
        _switch._set_torch_function_state(self.functions)
        return False

    def learn_fast_path(self, like: types.FunctionType) -> None:
        """Let ``fast_path`` run what later calls of the graph may call, if known; ``like``: the captured function."""
        if self.fast_path is not None or self.space is None or (compiled := self.code()) is None:
            return
        (name,) = (name for name in compiled.co_names if name.startswith("__compiled_fn"))
        asked = getattr(self.space[name], FAST_PATH, None)
        graph = None if asked is None else asked()
        if graph is not None:
            space = {**self.space, name: graph}
            self.fast_path = types.FunctionType(compiled, space, like.__code__.co_name, None, like.__closure__)


def _calling_directly(compiled: types.CodeType, space: dict[str, Any]) -> dict[str, Any]:
    """Return ``space`` with the graph's function itself, without the wrapper in which Dynamo is off: 1 us a call."""
    found = dict(space)
    for name in compiled.co_names:
        if name.startswith("__compiled_fn"):
            found[name] = getattr(space[name], "_torchdynamo_orig_callable", space[name])
    return found


class CompiledFrames:
    """Dynamo's compiled code for ``function``, by the values of its locals.

    Running that code is what Dynamo's wrapper does in the end, after as much time as a small model's forward takes.
    Only whole frames are found: code behind a graph break must run under the wrapper. Nothing is found while
    ``torch.compiler.set_stance`` is active, or, if ``has_backward``, compiled autograd. The guards that held last are
    checked first, without a look at the other entries: Dynamo takes ``cache_entry`` from the guards of an entry that it
    drops. 2.13.
    """

    def __init__(self, function: types.FunctionType, *, has_backward: bool = True) -> None:
        """Find nothing yet."""
        self._function = function
        self._compiles_autograd = _reader_of("compiled_autograd") if has_backward else lambda: False
        self._known: dict[int, Entry] = {}
        self._last: Entry | None = None

    def find(self, local: dict[str, Any]) -> Callable[..., Any] | None:
        """Return the code whose guards hold for ``local``: all arguments and free variables by name."""
        if self._is_unusual():
            return None
        before = None if _switch._is_torch_function_enabled() else _switch._get_torch_function_state()
        try:
            found = self._fitting(local)
        except RuntimeError:  # the check disables torch functions, and if it raises, leaves them disabled
            _switch._set_torch_function_state(_switch._TorchFunctionState.ENABLED if before is None else before)
            raise
        space = None if found is None else found.space
        compiled = None if found is None or space is None else found.code()
        if space is None or compiled is None:
            return None
        CALLS.generation += 1
        function = self._function
        space = space if dynamo_listens() is None else function.__globals__
        return types.FunctionType(compiled, space, function.__code__.co_name, None, function.__closure__)

    def forget_last(self) -> None:
        """Look at all entries again in the next call."""
        self._last = None

    def fast_path(self) -> Entry | None:
        """Return the entry whose code was found last, if its fast path is known: see ``Entry``."""
        last = self._last
        if last is None or self._is_unusual():
            return None
        last.learn_fast_path(self._function)
        last.stance, last.compiles_autograd = FRAMES._stance, self._compiles_autograd
        last.functions = _switch._get_torch_function_state()
        return None if last.fast_path is None else last

    def _is_unusual(self) -> bool:
        stance = FRAMES._stance
        return stance.stance != "default" or stance.backend is not None or self._compiles_autograd() is True

    def _fitting(self, local: dict[str, Any]) -> Entry | None:
        last = self._last
        if last is not None:
            guards = last.guards()
            if guards is not None and guards.cache_entry is not None and guards.root.check(local):
                return last
        for entry in reversed(compiled_entries(self._function.__code__)):  # those of fixed sizes are the older ones
            if entry.guard_manager.check(local):
                self._last = self._entry_of(entry)
                return self._last
        return None

    def _entry_of(self, entry: Any) -> Entry:
        compiled, guards, known = entry.code, entry.guard_manager, self._known
        found = known.get(id(compiled))
        if found is None or found.code() is not compiled or found.guards() is not guards:
            for key in [key for key, one in known.items() if one.code() is None]:
                del known[key]
            found = known[id(compiled)] = Entry(guards, compiled, self._function.__globals__)
        return found


def _reader_of(setting: str) -> Callable[[], Any]:
    """Return a fast reader of a Dynamo setting for this thread: through its module it takes 10 us per step, guards 40.

    Since 2.13, a setting is a context variable, which holds a sentinel of its own if nothing is set.
    """
    asked: Any = getattr(dynamo_config, "_config", {}).get(setting)
    given = getattr(asked, "user_override", None)
    if isinstance(given, contextvars.ContextVar) and not getattr(dynamo_config, setting):
        return given.get
    return lambda: getattr(dynamo_config, setting)

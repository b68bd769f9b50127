"""Detect accesses to a parameter's memory that bypass its version counter.

Before: ``weight.data[3] = 0`` or ``weight.detach().numpy()[3] = 0`` leaves no trace. After: the same code, but
``watched_memory`` is told before the caller gets the memory. What an access returns or raises is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.torch_compat.dynamo_frames import never_compiled
from amp_graph.passes.torch_compat.storage import forget_what_can_be_overridden, modules_with_accesses, storage_id
from amp_graph.passes.weights.watched_memory import WATCHED, handed_out, were_written

Access = Callable[..., Any]
# Methods of torch.Tensor that write to its memory, or whose result can, without moving a counter.
METHODS = (
    "numpy", "__dlpack__", "set_", "apply_", "map_", "map2_", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes",
)  # fmt: skip
FUNCTIONS = ("to_dlpack", "_to_dlpack", "_to_dlpack_versioned", *METHODS[-3:])
WRITERS = (
    "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_unsafe_set_version_counter",
)  # fmt: skip
# Code that reads addresses only to compare or to save tensors: torch 2.13, transformers 5.23, safetensors 0.8,
# huggingface_hub 2.4, for memory on the CPU.
READERS = ("torch", "transformers", "safetensors", "huggingface_hub")
PASSED_THROUGH = ("torch.storage", "torch._tensor")  # their callers are the ones of interest
# They ask for a tensor's storage at each capture, and keep only weak references; 2.11 - 2.13.
LOOKERS = ("torch._subclasses.", "torch._dynamo.", "torch._functorch.", "torch._inductor.", "torch.fx.")


class Replays:
    """The mark of the last replay of a CUDA graph, which may write to any weight: a new object each time."""

    mark: object = None


REPLAYS = Replays()
_undo: list[tuple[Any, str, Any]] = []  # (object, name, original attribute or _NOTHING)
_NOTHING = object()


def notice_accesses() -> None:
    """Detect accesses from now on, in the whole process; idempotent."""
    if _undo:
        return
    _put(Tensor, "data", _data())
    for name in METHODS:
        _put(Tensor, name, _method(getattr(Tensor, name), name))
    _put(Tensor, "untyped_storage", _storage())
    _put(Tensor, "data_ptr", _address(Tensor.data_ptr, "Tensor.data_ptr"))
    _put(torch.UntypedStorage, "data_ptr", _address(torch.UntypedStorage.data_ptr, "UntypedStorage.data_ptr"))
    _put(torch.cuda.CUDAGraph, "replay", _replay(torch.cuda.CUDAGraph.replay))
    for module in modules_with_accesses():
        for name in (name for name in (*FUNCTIONS, *WRITERS) if hasattr(module, name)):
            note = handed_out if name in FUNCTIONS else _note_writes
            _put(module, name, _noticing(getattr(module, name), name, module.__name__, note))
    forget_what_can_be_overridden()


def have_data_noticed(gm: GraphModule) -> None:
    """Let graphs read ``.data`` as Python code does: Dynamo's own reader (2.11 - 2.13) is not detected."""
    for part in (part for part in gm.modules() if isinstance(part, GraphModule)):
        readers = [n for n in part.graph.nodes if getattr(n.target, "__name__", "") == "_get_data_attr"]
        for node in readers:
            node.target = _data_of
        if readers:
            part.recompile()


def _data_of(tensor: Tensor) -> Tensor:
    return tensor.data


def leave_accesses_alone() -> None:
    """Undo ``notice_accesses``; for tests."""
    while _undo:
        owner, name, before = _undo.pop()
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    forget_what_can_be_overridden()


def _put(owner: Any, name: str, access: Any) -> None:
    _undo.append((owner, name, vars(owner).get(name, _NOTHING)))
    setattr(owner, name, access)


def _data() -> property:
    """Return a detecting ``Tensor.data``: reading it returns an alias with a counter of its own, as does setting it."""
    plain: Any = Tensor.data
    get, put = plain.__get__, plain.__set__

    def data(tensor: Tensor) -> Any:
        found = get(tensor)
        if WATCHED and not torch.compiler.is_dynamo_compiling():
            handed_out(tensor)
        return found

    def set_data(tensor: Tensor, other: Tensor) -> None:
        put(tensor, other)
        if WATCHED and not torch.compiler.is_dynamo_compiling():
            handed_out(tensor)

    never_compiled(data)
    never_compiled(set_data)
    return property(data, set_data, plain.__delete__, plain.__doc__)


def _replay(plain: Access) -> Access:
    """Return the method ``replay`` of CUDA graphs, with a new mark after it."""

    def access(graph: Any) -> None:
        plain(graph)
        REPLAYS.mark = object()

    return _named(access, plain, "CUDAGraph.replay", "torch.cuda.graphs")


def _named(access: Access, plain: Access, name: str, module: str) -> Access:
    never_compiled(access)
    found = wraps(plain)(access)
    found.__module__, found.__qualname__ = module, name
    return found


def _method(plain: Access, name: str) -> Access:
    """Return the tensor method ``plain`` with detection."""

    def access(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return getattr(self, name)(*args, **kwargs)  # by name, so that Dynamo recognizes methods
        found = plain(self, *args, **kwargs)
        if WATCHED:
            handed_out(self)
        return found

    # Dynamo lets graphs call set_ as a function, which they print by module and name.
    return _named(access, plain, f"Tensor.{name}", "torch.Tensor" if name == "set_" else "torch")


def _storage() -> Access:
    """Return ``Tensor.untyped_storage`` with detection; captures are exempt."""
    plain = Tensor.untyped_storage

    def access(self: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.untyped_storage()
        found = plain(self)
        watch = WATCHED.get(found._cdata) if WATCHED else None
        if watch is not None and not sys._getframe(1).f_globals.get("__name__", "").startswith(LOOKERS):
            watch.was_handed_out()
        return found

    return _named(access, plain, "Tensor.untyped_storage", "torch")


def _noticing(plain: Access, name: str, module: str, note: Callable[[Any], None] = handed_out) -> Access:
    """Return ``plain``, an access to the memory of its first argument, which calls ``note`` afterwards."""

    def access(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return plain(*args, **kwargs)
        found = plain(*args, **kwargs)
        if WATCHED and args:
            note(args[0])
        return found

    return _named(access, plain, name, module)


def _note_writes(first: Any) -> None:
    """Record a write to a tensor, or to those of a list."""
    were_written((first,) if isinstance(first, Tensor) else [t for t in first if isinstance(t, Tensor)])


def _address(plain: Access, name: str) -> Access:
    """Return ``plain``, which returns an address, with detection of callers that are not known to be harmless."""

    def access(memory: Any) -> int:
        if torch.compiler.is_dynamo_compiling():
            return memory.data_ptr()
        found: int = plain(memory)
        if WATCHED:
            _note_address(memory)
        return found

    return _named(access, plain, name, "torch")


def _note_address(memory: Any) -> None:
    try:  # hidden from modes and subclasses
        watch = WATCHED.get(memory._cdata if isinstance(memory, torch.UntypedStorage) else storage_id(memory))
    except (RuntimeError, NotImplementedError, TypeError):
        return
    if watch is not None and watch.is_on_cpu and not _is_reader(next(_callers())):
        watch.address = True
        watch.was_handed_out()


def _callers() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in PASSED_THROUGH:
            yield name
        frame = frame.f_back
    yield ""


def _is_reader(module: str) -> bool:
    return module.partition(".")[0] in READERS or module.startswith("amp_graph.")

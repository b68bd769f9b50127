"""A model without its memory: fake tensors for its parameters and inputs, so that it can be planned after a training.

Before: a model of 7 GB, and one call of it. After: a ``Sketch`` of a few MB that does the same on fake tensors; neither
reads a value of the model, nor writes to any object of it.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from amp_graph.errors import AmpGraphError
from amp_graph.model_state import CONVERSION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.torch_compat.dispatch import is_wrapper
from amp_graph.passes.torch_compat.fake import FakeTensorMode
from amp_graph.passes.torch_compat.modules import behind_compile, is_compiled, is_fsdp

CONTAINERS = (dict, OrderedDict, list, tuple, set)  # that a module may hold modules and tensors in
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ACCELERATES = "_original_forward"  # what accelerate replaced by one under autocast, in the model
REFUSED = (
    ("converted already", lambda part: CONVERSION in part.__dict__),
    ("sharded", is_fsdp),
    ("compiled", is_compiled),
)
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)  # arguments that are no tensors


@dataclass
class ModelCall:
    """A call of a model: its arguments, and how often the model was called so.

    Tensors are a ``partial`` that makes such a one, arguments of other kinds their class.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    calls: int = 1


@dataclass(frozen=True)
class Sketch:
    """A model on fake tensors, with the arguments of one call, in their mode."""

    name: str
    model: Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    mode: FakeTensorMode
    call: ModelCall


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelCall:
    """Return a call that holds nothing of the user's: no tensor, and no object that may have some."""
    args, kwargs = tree_map(_given, (args, kwargs))
    return ModelCall(args, kwargs)


def _given(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and not is_wrapper(leaf) and leaf.layout == torch.strided:
        return partial(
            torch.empty_strided, tuple(leaf.shape), leaf.stride(),
            dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad,
        )  # fmt: skip
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def refuse(model: Module) -> None:
    """Raise AmpGraphError, which says why, for a model that is never sketched."""
    for part in model.modules():
        for what, is_so in REFUSED:
            if is_so(part):
                raise AmpGraphError(f"{type(_inner(model)).__name__} is {what}")


def _inner(model: Module) -> Module:
    model = behind_compile(model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def sketch_of(model: Module, call: ModelCall) -> Sketch:
    """Return a sketch of a model that is not sharded; AmpGraphError says why there is none."""
    inner = _inner(model)
    name = type(inner).__name__
    refuse(inner)
    for leaf in tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, type):
            raise AmpGraphError(f"{name} is called with a {leaf.__name__}")
    mode, held = FakeTensorMode(allow_non_fake_inputs=True), {p.dtype for p in inner.parameters()}
    with mode:
        given = tree_map(lambda one: _fake(one, held) if isinstance(one, partial) else one, (call.args, call.kwargs))
    args, kwargs = given
    return Sketch(name, _Copy(mode).of(inner), args, kwargs, mode, call)


def _fake(given: partial[Tensor], held: Collection[torch.dtype]) -> Tensor:
    """Return a fake of ``given``; ``held``: the dtypes of the model's parameters.

    Beside float32 parameters, the script's autocast lowered it: outside of autocast it is float32.
    """
    dtype = given.keywords["dtype"]
    return given(dtype=torch.float32 if dtype in HALVES and dtype not in held else dtype)


class _Copy:
    """Copies modules, the containers in them and their tensors, these as fakes; what else they hold is copied flat."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the copy of ``value``, the same one for the same object."""
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value)
        return self._made[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Module):
            return self._module(value)
        if isinstance(value, Tensor):
            with torch.no_grad():
                return self.mode.from_tensor(value)
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, {key: self.of(one) for key, one in value.items()})
        if isinstance(value, dict) and type(value) in CONTAINERS:
            return type(value)((key, self.of(one)) for key, one in value.items())
        if isinstance(value, (list, tuple, set)) and type(value) in CONTAINERS:
            return type(value)(map(self.of, value))
        if isinstance(value, (weakref.ReferenceType, type)) or callable(value) or hasattr(value, "__array__"):
            return value
        return copy.copy(value)

    def _module(self, module: Module) -> Module:
        left_out = _of_accelerate(module)
        if "forward" in module.__dict__ and not left_out:
            raise AmpGraphError(f"the forward of {type(module).__name__} was replaced")
        made: Module = object.__new__(type(module))
        self._made[id(module)] = made  # before its parts, which may hold it
        for name, value in module.__dict__.items():
            if name not in left_out:
                made.__dict__[name] = self._hooks(value) if name in HOOKS else self.of(value)
        return made

    def _hooks(self, hooks: Mapping[Any, Any]) -> Any:
        """Return torch's own hooks, such as those of weight norms; the user's may do anything."""
        modules = {key: getattr(one, "__module__", None) or type(one).__module__ for key, one in hooks.items()}
        return OrderedDict((key, hooks[key]) for key, name in modules.items() if name.partition(".")[0] == "torch")


def _of_accelerate(module: Module) -> tuple[str, ...]:
    """Return the attributes by which accelerate runs the forward of the class under autocast; () if it does not."""
    forward: Any = module.__dict__.get("forward")
    original: Any = module.__dict__.get(ACCELERATES)
    functions = {getattr(one := inspect.unwrap(given), "__func__", one) for given in (forward, original)}
    return ("forward", ACCELERATES) if functions == {inspect.unwrap(type(module).forward)} else ()

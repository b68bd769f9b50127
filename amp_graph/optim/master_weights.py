"""Levels O2 and O3: parameters held in low precision, and for O2 the fp32 master weights behind them.

Before: ``linear.weight`` is fp32, and an optimizer updates it. After: it is bf16, ``forward`` reads it as it is, and
the optimizer updates its fp32 master, which is rounded into it. ``state_dict`` speaks of the masters.
Source of the method: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from amp_graph.passes.graph.node_info import matches_path
from amp_graph.passes.torch_compat.module_attributes import plain_attribute
from amp_graph.passes.torch_compat.modules import with_parameters
from amp_graph.passes.torch_compat.storage import StorageWeakRef, address_of, storage_key, storage_of
from amp_graph.passes.weights.update_tracking import hear_of_updates
from amp_graph.passes.weights.watched_memory import watch_of
from amp_graph.policy import HALVES, Policy

MASTER = "_amp_graph_master"  # the attribute of a parameter that is held in low precision
UNKNOWN = -1  # the version in a pickle, whose parameter counts anew


class Memory:
    """Where a tensor lies: two are never at one place, though one be freed before the other is made."""

    __slots__ = ("address", "storage")

    def __init__(self, tensor: Tensor) -> None:
        """Take note of the place; the weak reference keeps its name, not its bytes."""
        self.storage, self.address = StorageWeakRef(storage_of(tensor)), address_of(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Say whether ``tensor`` lies there."""
        return address_of(tensor) == self.address and storage_key(tensor) == self.storage.cdata


@dataclass
class Master:
    """What stands behind a parameter held in low precision.

    full: its fp32 value, which optimizers update, or None where none is kept (O3, frozen or made in eval mode).
    version, memory: the parameter's version counter and memory when it was last equal to the rounded ``full``.
    mark: what else shows a write to the parameter; None where some write may not show, and values are compared.
    late: whether there is to be a value once the parameter is updated (O2).
    """

    full: Tensor | None
    version: int
    memory: Memory | None = None
    of: weakref.ref[Tensor] | None = None
    late: bool = False
    mark: object = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the value, which whoever unpickles it has for an equal one."""
        parameter = self.of() if self.of is not None else None
        if parameter is not None:
            master_of(parameter)
        return {"full": self.full, "version": UNKNOWN, "memory": None, "of": None, "late": self.late}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, maybe in a process in which nothing was converted: no optimizer knows of masters there."""
        from amp_graph.optim.master_weight_updates import let_optimizers_update_masters  # which imports this module

        self.__dict__.update(state)
        let_optimizers_update_masters()


# -- lowering and back --------------------------------------------------------------------------------


@contextmanager
def lower_parameters(model: Module, policy: Policy) -> Iterator[None]:
    """Hold the fp32 parameters of ``model`` in low precision, in place: the same Parameter objects.

    Where a line of this raises, or of the ``with`` block, everything is as it was before.
    O2 leaves the parameters of normalization layers (modules without parametrized parts whose class is called a Norm,
    as all of torch's and transformers' are) and of modules that ``keep_fp32`` matches, and keeps fp32 masters of what
    trains; O3 lowers all and keeps none. Buffers stay.
    """
    lowered = list(_lowerable(model, policy))
    with unchanged_where_it_raises(model, lowered):
        for parameter in lowered:
            full = parameter.data
            keeps = policy.level == "O2" and parameter.requires_grad and model.training
            _hold(parameter, full.to(policy.torch_dtype(full.device.type)))
            _set_master(parameter, full if keeps else None, late=policy.level == "O2")
        _speak_fp32(model, lowered)
        yield


@contextmanager
def restore_parameters(model: Module) -> Iterator[None]:
    """Hold all parameters in fp32 again: the masters' values where there are some.

    Where a line of this raises, or of the ``with`` block, everything is as it was before.
    """
    held = [p for p in model.parameters() if hasattr(p, MASTER)]
    with unchanged_where_it_raises(model, held):
        for parameter in held:
            _hold(parameter, full_value(parameter))
            delattr(parameter, MASTER)
        for module in model.modules():
            _remove(module._state_dict_hooks, _save_fp32)
            _remove(module._load_state_dict_pre_hooks, _load_fp32)
        yield


@contextmanager
def unchanged_where_it_raises(
    model: Module, parameters: Iterable[Parameter], others: Sequence[dict[Any, Any]] = ()
) -> Iterator[None]:
    """Give ``model`` back as it was where the block raises: its attributes, ``parameters`` and hooks of checkpoints.

    And the ``others``, which hold hooks too. Parameters get back their data, gradients and masters: what is rounded
    meanwhile takes memory of its own for so long.
    """
    before = [(p, p.data, p.grad, p.__dict__.get(MASTER)) for p in parameters]
    # The dicts stay the same objects: by them the handles of users' hooks find what to remove.
    holders: list[dict[Any, Any]] = [model.__dict__, *others]
    holders += [h for m in model.modules() for h in (m._state_dict_hooks, m._load_state_dict_pre_hooks)]
    dicts = [(held, held.copy()) for held in holders]
    try:
        yield
    except BaseException:
        for parameter, data, grad, master in before:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
            put_master_back(parameter, master)
        for held, known in dicts:
            held.clear()
            held.update(known)
        raise


def put_master_back(parameter: Tensor, master: Master | None) -> None:
    """Let ``master`` stand behind ``parameter`` again, as before what raised."""
    if master is not None:
        setattr(parameter, MASTER, master)
    else:
        parameter.__dict__.pop(MASTER, None)


def _hold(parameter: Parameter, data: Tensor) -> None:
    grad, parameter.grad = parameter.grad, None
    parameter.data = data
    parameter.grad = None if grad is None else grad.to(data.dtype)


def copy_masters(model: Module, memo: dict[int, Any]) -> None:
    """Give the copies of ``model``'s parameters in ``memo`` (of ``deepcopy``) masters of their own.

    Copies are made here where there are none yet: in a copy, the conversion stands before the parameters.
    """
    for parameter in model.parameters():
        master = getattr(parameter, MASTER, None)
        if master is not None:
            copied = copy.deepcopy(parameter, memo)
            full = None if master.full is None else full_value(parameter).clone()
            if full is not None:  # an optimizer that is copied too may hold it, and may have been copied before
                full = memo.setdefault(id(master.full), full)
            _set_master(copied, full, master.late)


def _lowerable(model: Module, policy: Policy) -> Iterator[Parameter]:
    """Yield the parameters that ``policy`` holds in low precision, each once."""
    kept = {id(p) for module in _kept(model, policy) for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter.dtype is torch.float32 and id(parameter) not in kept:
            yield parameter


def _kept(model: Module, policy: Policy) -> Iterator[Module]:
    for path, module in model.named_modules():
        named = policy.keep_fp32 and matches_path(policy.keep_fp32, path)
        # A cast has no sparse gradient.
        if named or plain_attribute(module, "sparse") is True or (policy.level == "O2" and _is_norm(module)):
            yield module


def _is_norm(module: Module) -> bool:
    inner = sum(len(list(child.parameters())) for child in module.children())
    return re.search(r"[Nn]orm(?![a-z])", type(module).__name__) is not None and not inner


# -- the value behind a parameter ---------------------------------------------------------------------


def master_of(parameter: Tensor) -> Tensor | None:
    """Return the fp32 master of ``parameter``, or None where it has none; follows what was written since."""
    master: Master | None = getattr(parameter, MASTER, None)
    if master is None or master.full is None:
        return None
    if master.version == UNKNOWN:
        _set_master(parameter, master.full)
    elif parameter._version != master.version:  # written by hand: what was written counts
        follow(parameter)
    elif master.memory is None or not master.memory.is_of(parameter):  # ``p.data = ...``, which bumps no counter
        _follow_move(parameter, master)
    elif master.mark is None or master.mark is not watch_of(parameter).mark:  # ``p.data.mul_``, maybe
        _follow_move(parameter, master)
    return master.full


def follow(parameter: Tensor) -> None:
    """Give the master of ``parameter``, where it has one, the value that the parameter has now."""
    master: Master | None = getattr(parameter, MASTER, None)
    if master is not None and master.full is not None:
        with torch.no_grad():
            master.full.copy_(parameter)
        _note_equal(parameter, master)


def _follow_move(parameter: Tensor, master: Master) -> None:
    """Follow a parameter whose memory is another: moved, by ``model.to``, or replaced, by ``vector_to_parameters``.

    Elements that are what the master rounds to were only moved: these keep the bits that rounding loses.
    """
    full = master.full
    assert full is not None, "asked for where there is one"
    with torch.no_grad():
        if full.shape != parameter.shape:
            full.data = parameter.detach().to(full.dtype)
        if full.device != parameter.device:
            full.data = full.to(parameter.device)
        roundings = [full.to(dtype).to(parameter.dtype) for dtype in (full.dtype, *HALVES)]
        moved = torch.stack([rounded == parameter for rounded in roundings]).any(0)
        full.copy_(torch.where(moved, full, parameter))
    _note_equal(parameter, master)


def _note_equal(parameter: Tensor, master: Master) -> None:
    master.version, master.mark = parameter._version, _mark(parameter)
    if master.memory is None or not master.memory.is_of(parameter):
        master.memory = Memory(parameter)


def _mark(parameter: Tensor) -> object:
    watch = watch_of(parameter)
    mark = watch.mark  # before it is asked whether anybody has the memory
    return None if watch.why_not_free(parameter) else mark


def _set_master(parameter: Tensor, full: Tensor | None, late: bool = False) -> None:
    hear_of_updates()
    mark = None if full is None else _mark(parameter)
    made = Master(full, parameter._version, Memory(parameter), weakref.ref(parameter), late, mark)
    setattr(parameter, MASTER, made)


def updated_master(parameter: Tensor) -> Tensor | None:
    """Return the master that an update of ``parameter`` goes to, made now where level O2 kept none so far."""
    master: Master | None = getattr(parameter, MASTER, None)
    late = master is not None and master.full is None and master.late
    return make_master(parameter) if late and parameter.requires_grad else master_of(parameter)


def make_master(parameter: Tensor) -> Tensor:
    """Return the fp32 master of a parameter in low precision, made from its value where there is none yet."""
    found = master_of(parameter)
    if found is None:
        found = parameter.detach().float()
        _set_master(parameter, found)
    return found


def share_master(parameter: Tensor, full: Tensor) -> None:
    """Make ``full`` the master of a copied ``parameter``, or its memory where its model was reverted."""
    if parameter.dtype in HALVES:
        _set_master(parameter, full)
    else:
        full.data = parameter.data


def full_value(parameter: Tensor) -> Tensor:
    """Return the value of ``parameter`` in fp32: its master, or its own value widened."""
    found = master_of(parameter)
    return parameter.detach().float() if found is None else found


def write_back(parameters: Sequence[Tensor]) -> None:
    """Round masters into their parameters; those of a reverted model are their masters."""
    parameters = [p for p in parameters if hasattr(p, MASTER)]
    if parameters:
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), [getattr(p, MASTER).full for p in parameters])
        were_written_back(parameters)


def were_written_back(parameters: Sequence[Tensor]) -> None:
    """Take note that the parameters are equal to their rounded masters."""
    for parameter in parameters:
        if hasattr(parameter, MASTER):  # else it was reverted since
            _note_equal(parameter, getattr(parameter, MASTER))


# -- forward ------------------------------------------------------------------------------------------


def widened(model: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, in which the model's low parameters are seen as fp32: what its author wrote it for.

    In a captured graph a parameter that is widened only to be lowered again is read as it is.
    """

    def amp_graph_widened(*args: Any, **kwargs: Any) -> Any:
        wide = {name: p.float() for name, p in model.named_parameters() if p.dtype in HALVES}
        with with_parameters(model, wide):
            return forward(*args, **kwargs)

    return amp_graph_widened


# -- checkpoints --------------------------------------------------------------------------------------


def _speak_fp32(model: Module, lowered: Sequence[Parameter]) -> None:
    """Let every module that has a ``lowered`` parameter, tied ones too, save it in fp32 and load it into its master."""
    held = {id(p) for p in lowered}
    for module in model.modules():
        if any(id(p) in held for p in module._parameters.values()):
            module.register_state_dict_post_hook(_save_fp32)
            module.register_load_state_dict_pre_hook(_load_fp32)


def _save_fp32(module: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        found = state.get(prefix + name)
        if parameter is not None and hasattr(parameter, MASTER) and isinstance(found, Tensor):
            if found is not parameter:  # keep_vars=True asks for the parameter itself
                state[prefix + name] = full_value(parameter)


def _load_fp32(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put what is loaded into the masters exactly; the parameters themselves are about to be loaded, rounded."""
    for name, parameter in module._parameters.items():
        master: Master | None = getattr(parameter, MASTER, None)
        given = state.get(prefix + name)
        if master is None or master.full is None or parameter is None or not isinstance(given, Tensor):
            continue
        if given.shape == parameter.shape:
            with torch.no_grad():
                master.full.copy_(given)
            names = [n for n, p in module._parameters.items() if p is parameter and prefix + n in state]
            _note_equal(parameter, master)
            master.version += len(names)  # of the copies that torch makes next


def _remove(hooks: dict[int, Any], hook: Callable[..., None]) -> None:
    """Remove ``hook``, which torch may have wrapped, from ``hooks``."""
    for key in [key for key, found in hooks.items() if hook in (found, getattr(found, "hook", None))]:
        del hooks[key]

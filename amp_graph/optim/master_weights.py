"""Levels O2 and O3: parameters held in low precision, and for O2 the fp32 master weights behind them.

Before: ``linear.weight`` is fp32, and an optimizer updates it. After: it is bf16, ``forward`` reads it without a cast,
and the optimizer updates its fp32 master, which is rounded into it. ``state_dict`` holds the masters.
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

from amp_graph.lists.errors import Undo
from amp_graph.passes.graph.node_info import matches_path
from amp_graph.passes.torch_compat.modules import plain_attribute, with_parameters
from amp_graph.passes.torch_compat.operators import foreach_copy_
from amp_graph.passes.torch_compat.optimizers import load_hooks_of
from amp_graph.passes.torch_compat.storage import address_of
from amp_graph.policy import Policy
from amp_graph.policy_words import HALVES

MASTER = "_amp_graph_master"  # the attribute of a parameter that is held in low precision
UNKNOWN = -1  # the version in a pickle; the unpickled parameter's counter restarts


@dataclass
class Master:
    """The master of a parameter held in low precision.

    full: its fp32 value, which optimizers update, or None if none is kept (O3, frozen or converted in eval mode).
    version, memory: the parameter's version counter, and an alias of it, when it was last equal to the rounded
    ``full``; the alias holds its memory, so that no other tensor gets that.
    late: whether the master is created at the parameter's first update (O2).
    """

    full: Tensor | None
    version: int
    memory: Tensor | None = None
    of: weakref.ref[Tensor] | None = None
    late: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the value; the unpickled master counts as equal to its parameter."""
        parameter = self.of() if self.of is not None else None
        if parameter is not None:
            master_of(parameter)
        return {"full": self.full, "version": UNKNOWN, "memory": None, "of": None, "late": self.late}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, and enable masters in optimizers, as the process may not have converted anything yet."""
        from amp_graph.optim.master_weight_updates import let_optimizers_update_masters  # it imports this module

        self.__dict__.update(state)
        let_optimizers_update_masters()


# -- lowering and back --------------------------------------------------------------------------------


@contextmanager
def lower_parameters(model: Module, policy: Policy) -> Iterator[None]:
    """Hold the fp32 parameters of ``model`` in low precision, in place: the same Parameter objects.

    If this or the ``with`` block raises, everything is restored.
    O2 excludes parameters of normalization layers (modules without parametrized submodules whose class name contains
    Norm, as all of torch's and transformers' do) and of modules that ``keep_fp32`` matches, and keeps fp32 masters of
    trained parameters; O3 lowers all and keeps no masters. Buffers stay fp32.
    """
    from amp_graph.optim.master_weight_updates import keep_states, optimizers_there  # it imports this module

    kept = {id(p) for module in _kept(model, policy) for p in module.parameters(recurse=False)}
    lowered = [p for p in model.parameters() if p.dtype is torch.float32 and id(p) not in kept]
    optimizers = optimizers_there()
    with unchanged_where_it_raises(model, lowered, [held for one in optimizers for held in load_hooks_of(one)]):
        for parameter in lowered:
            full = parameter.data
            keeps = policy.level == "O2" and parameter.requires_grad and model.training
            hold_as(parameter, full.to(policy.torch_dtype(full.device.type)))
            set_master(parameter, full if keeps else None, late=policy.level == "O2")
        _speak_fp32(model, lowered)
        for optimizer in optimizers:
            keep_states(optimizer)
        yield


@contextmanager
def restore_parameters(model: Module) -> Iterator[None]:
    """Hold all parameters in fp32 again, with the masters' values where they exist.

    If this or the ``with`` block raises, everything is restored.
    """
    held = [p for p in model.parameters() if hasattr(p, MASTER)]
    with unchanged_where_it_raises(model, held):
        for parameter in held:
            hold_as(parameter, full_value(parameter))
            delattr(parameter, MASTER)
        for module in model.modules():
            _remove(module._state_dict_hooks, _save_fp32)
            _remove(module._load_state_dict_pre_hooks, _load_fp32)
            _remove(module._load_state_dict_pre_hooks, _find_optimizers)
        yield


@contextmanager
def unchanged_where_it_raises(
    model: Module, parameters: Iterable[Tensor], others: Sequence[dict[Any, Any]] = ()
) -> Iterator[None]:
    """If the block raises, restore ``model``: its attributes, ``parameters`` and checkpoint hooks, and ``others``.

    Parameters get back their data, gradients and masters, so rounded values need extra memory until the block ends.
    """
    before = [(p, p.data, p.grad, p.__dict__.get(MASTER)) for p in parameters]
    # The dicts must stay the same objects: the handles of users' hooks refer to them.
    holders: list[dict[Any, Any]] = [model.__dict__, *others]
    holders += [h for m in model.modules() for h in (m._state_dict_hooks, m._load_state_dict_pre_hooks)]
    dicts = [(held, held.copy()) for held in holders]

    def undo() -> None:
        for parameter, data, grad, master in before:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
            parameter.__dict__.pop(MASTER, None)
            if master is not None:
                setattr(parameter, MASTER, master)
        for held, known in dicts:
            held.clear()
            held.update(known)

    with Undo(undo):
        yield


def hold_as(parameter: Parameter, data: Tensor) -> None:
    """Make ``data`` the value of ``parameter``, in another dtype, with its gradient."""
    grad, parameter.grad = parameter.grad, None
    parameter.data = data
    if parameter.grad_dtype not in (None, data.dtype):  # set by an unscaling that held the gradient in fp32
        parameter.grad_dtype = data.dtype
    parameter.grad = None if grad is None else grad.to(data.dtype)


def copy_masters(model: Module, memo: dict[int, Any]) -> None:
    """Give the copies of ``model``'s parameters in ``memo`` (of ``deepcopy``) their own masters.

    Missing copies are made here: ``deepcopy`` reaches the conversion before the parameters.
    """
    for parameter in model.parameters():
        master = getattr(parameter, MASTER, None)
        if master is not None:
            copied = copy.deepcopy(parameter, memo)
            full = None if master.full is None else full_value(parameter).clone()
            if full is not None:  # an optimizer that was copied earlier may hold it
                full = memo.setdefault(id(master.full), full)
            set_master(copied, full, master.late)


def _kept(model: Module, policy: Policy) -> Iterator[Module]:
    """Yield the modules whose own parameters stay fp32 under ``policy``."""
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
    """Return the fp32 master of ``parameter``, updated after writes to the parameter, or None.

    On the CPU values are compared, as writes through ``.data`` and by torch's fused optimizers count no version; on
    other devices, where a comparison would wait for the device, such a write is not seen.
    """
    master: Master | None = getattr(parameter, MASTER, None)
    if master is None or master.full is None:
        return None
    if master.version == UNKNOWN:
        set_master(parameter, master.full)
    elif (
        parameter._version != master.version  # the user wrote the parameter
        or master.memory is None
        or address_of(master.memory) != address_of(parameter)  # ``p.data = ...``, which bumps no counter
        or (parameter.is_cpu and not torch.equal(master.full.to(parameter.dtype), parameter))  # ``p.data.mul_``
    ):
        _follow_changed(parameter, master)
    return master.full


def follow(parameter: Tensor) -> None:
    """Update the master of ``parameter``, if it has one, whatever the counters say."""
    master: Master | None = getattr(parameter, MASTER, None)
    if master is not None and master.full is not None:
        _follow_changed(parameter, master)


def _follow_changed(parameter: Tensor, master: Master) -> None:
    """Update the master of a parameter that was written, moved by ``model.to``, or set by ``vector_to_parameters``.

    Elements equal to the rounded master have not changed: they keep the master's bits. DDP, for one, writes the values
    that it broadcasts over those that are there.
    """
    full = master.full
    assert full is not None, "only called with a master"
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
    master.version, master.memory = parameter._version, parameter.data


def set_master(parameter: Tensor, full: Tensor | None, late: bool = False) -> None:
    """Make ``full`` the master of ``parameter``; ``late``: it has none before its first update."""
    made = Master(full, parameter._version, parameter.data, weakref.ref(parameter), late)
    setattr(parameter, MASTER, made)


def updated_master(parameter: Tensor) -> Tensor | None:
    """Return the master that an update of ``parameter`` writes; create it if level O2 has none yet."""
    master: Master | None = getattr(parameter, MASTER, None)
    late = master is not None and master.full is None and master.late
    return make_master(parameter) if late and parameter.requires_grad else master_of(parameter)


def make_master(parameter: Tensor) -> Tensor:
    """Return the fp32 master of a low-precision parameter; create it from the value if needed."""
    found = master_of(parameter)
    if found is None:
        found = parameter.detach().float()
        set_master(parameter, found)
    return found


def full_value(parameter: Tensor) -> Tensor:
    """Return the value of ``parameter`` in fp32: its master, or its own value upcast."""
    found = master_of(parameter)
    return parameter.detach().float() if found is None else found


def write_back(parameters: Sequence[Tensor]) -> None:
    """Round masters into their parameters; parameters of a reverted model are their own masters."""
    parameters = [p for p in parameters if hasattr(p, MASTER)]
    if parameters:
        with torch.no_grad():
            foreach_copy_(list(parameters), [getattr(p, MASTER).full for p in parameters])
        were_written_back(parameters)


def were_written_back(parameters: Sequence[Tensor]) -> None:
    """Record that the parameters are equal to their rounded masters."""
    for parameter in parameters:
        if hasattr(parameter, MASTER):  # else it was reverted meanwhile
            _note_equal(parameter, getattr(parameter, MASTER))


# -- forward ------------------------------------------------------------------------------------------


def widened(model: Module, forward: Callable[..., Any], own: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """Wrap ``forward`` so that it sees the model's low-precision parameters upcast to fp32, but for its ``own``.

    In a captured graph, an upcast followed by a downcast of a parameter is removed.
    """

    def amp_graph_widened(*args: Any, **kwargs: Any) -> Any:
        wide = {n: p.float() for n, p in model.named_parameters() if p.dtype in HALVES and n not in own}
        with with_parameters(model, wide):
            return forward(*args, **kwargs)

    return amp_graph_widened


# -- checkpoints --------------------------------------------------------------------------------------


def _speak_fp32(model: Module, lowered: Sequence[Parameter]) -> None:
    """Make every module with a ``lowered`` parameter, even if tied, save it in fp32 and load it into its master."""
    held = {id(p) for p in lowered}
    for module in model.modules():
        if any(id(p) in held for p in module._parameters.values()):
            module.register_state_dict_post_hook(_save_fp32)
            module.register_load_state_dict_pre_hook(_load_fp32)
    model.register_load_state_dict_pre_hook(_find_optimizers)


def _find_optimizers(*_: Any) -> None:
    """Let optimizers that were built meanwhile keep fp32 states: their states are usually loaded after the model's."""
    from amp_graph.optim.master_weight_updates import keep_loaded_states  # it imports this module

    keep_loaded_states()


def _save_fp32(module: Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        found = state.get(prefix + name)
        if parameter is not None and hasattr(parameter, MASTER) and isinstance(found, Tensor):
            if found is not parameter:  # keep_vars=True returns the parameter itself
                state[prefix + name] = full_value(parameter)


def _load_fp32(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Copy loaded values exactly into the masters; torch then loads the rounded parameters."""
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
            master.version += len(names)  # after the copies that torch makes next


def _remove(hooks: dict[int, Any], hook: Callable[..., None]) -> None:
    """Remove ``hook``, possibly wrapped by torch, from ``hooks``."""
    for key in [key for key, found in hooks.items() if hook in (found, getattr(found, "hook", None))]:
        del hooks[key]

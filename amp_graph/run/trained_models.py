"""Decides which models are converted: those that are called outermost and whose parameters receive gradients.

The first calls run as written. A hook on each parameter tells that a backward reached it; the model is then converted
at its next call outside of a backward.
"""

from __future__ import annotations

import enum
import importlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from amp_graph.passes.torch_compat.dispatch import being_traced, has_modes, in_transform, is_autocast_on
from amp_graph.run import eligibility as why
from amp_graph.run.call_site import is_checkpointed_call, owner_of_call, site_of_call
from amp_graph.run.loss_scaling import LossScaling
from amp_graph.run.options import RunOptions
from amp_graph.run.step_times import StepTimes

if TYPE_CHECKING:
    from amp_graph.run.conversions import Converted

LOOKED_AT = 8  # first calls of a frozen model that look for parameters that were unfrozen; then every 16th


class State(enum.Enum):
    """Where a model is on its way."""

    WATCHED = "watched"
    CONVERTED = "converted"
    LEFT = "left"
    PART = "part of another, or without parameters"


@dataclass(eq=False)
class Model:
    """What is known of one model; no strong reference to it, so that the script's models die when it drops them."""

    ref: weakref.ref[torch.nn.Module]
    kind: str
    parameters: int
    site: str = ""
    state: State = State.WATCHED
    reason: str = ""
    is_trained: bool = False
    saw_gradients: bool = False  # called with gradients enabled
    is_scaled: bool = False  # in fp16, with a scale of ours
    in_autocast: bool = False  # its present call is under the script's torch.autocast
    calls: int = 0
    hooks: list[Any] = field(default_factory=list)
    converted: Converted | None = None

    def leave(self, reason: str) -> None:
        """Leave the model as written."""
        self.state, self.reason = State.LEFT, reason
        self.unhook()

    def unhook(self) -> None:
        """Remove the hooks of its parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def why_not_converted(self) -> str:
        """Return why it was left as written."""
        if self.reason:
            return self.reason
        if not self.saw_gradients:
            return why.NO_GRADIENTS
        return why.NEVER_TRAINED if self.hooks else why.FROZEN


class TrainedModels:
    """All models that the script has called, by identity; told of calls by ``module_calls.hear``."""

    def __init__(self, options: RunOptions, times: StepTimes, note: Callable[[str], None]) -> None:
        """Know no model yet."""
        self.options, self.times, self.note = options, times, note
        self.scaling = LossScaling(self._give_up_fp16)
        self.seen: list[Model] = []
        self._by_id: dict[int, tuple[Model, weakref.ref[torch.nn.Module]]] = {}
        self._off = False
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Convert nothing from now on."""
        self._off = True

    # -- told of calls --------------------------------------------------------------------------------

    def before(self, module: torch.nn.Module) -> Model | None:
        """Take note of a call of ``module``, and convert it if it is known to be trained."""
        if self._off:
            return None
        found = self._by_id.get(id(module))
        model = found[0] if found is not None else self._first_seen(module)
        if model.state is State.WATCHED:
            self._advance(model)
        return model

    def under_autocast(self, model: Model) -> None:
        """Leave a model whose forward has autocast regions of its own."""
        if model.state is State.WATCHED and not model.in_autocast:
            model.leave(why.INNER_AUTOCAST)

    def after(self, model: Model) -> None:
        """Watch the parameters of a model after its first call; count the graphs of a converted one."""
        if model.converted is not None:
            model.converted.refresh()
        elif model.state is State.WATCHED and not model.hooks and self._is_to_be_watched(model):
            self._watch(model)

    def failed(self, error: Exception) -> None:
        """Convert nothing more after an error of our own; the script goes on."""
        self.stop()
        self.note(f"nothing more is converted, as amp-graph run itself failed: {type(error).__name__}: {error}")

    # -- on the way -----------------------------------------------------------------------------------

    def _first_seen(self, module: torch.nn.Module) -> Model:
        owner = owner_of_call(module)
        if owner is not module:  # model.forward(x) is called directly: the model is what is trained
            known = self._by_id.get(id(owner))
            model = known[0] if known is not None else self._added(owner)
            self._keep(module, model)
            return model
        return self._added(module)

    def _added(self, module: torch.nn.Module) -> Model:
        inner = why.inner_of(module)
        count = sum(p.numel() for p in inner.parameters() if not torch.nn.parameter.is_lazy(p))
        model = Model(weakref.ref(module), why.kind_of(module), count)
        self._keep(module, model)
        if next(module.parameters(), None) is None:
            model.state = State.PART
            return model
        model.site = site_of_call()
        self.seen.append(model)
        if reason := why.why_left(module, self.options.policy):
            model.leave(reason)
            self.scaling.leave(module)
        elif is_checkpointed_call():
            model.leave(why.CHECKPOINTED)
        elif any(part is module for m in self.seen if m.converted is not None for part in m.converted.modules()):
            model.state = State.PART
        return model

    def _keep(self, module: torch.nn.Module, model: Model) -> None:
        key = id(module)

        def forget(ref: weakref.ref[torch.nn.Module]) -> None:
            known = self._by_id.get(key)
            if known is not None and known[1] is ref:
                del self._by_id[key]

        self._by_id[key] = (model, weakref.ref(module, forget))

    def _advance(self, model: Model) -> None:
        model.calls += 1
        model.in_autocast = is_autocast_on()
        if not torch.is_grad_enabled() or in_transform() or being_traced() or has_modes():
            return
        if not model.saw_gradients:
            model.saw_gradients, model.site = True, site_of_call()
        if model.in_autocast and not self.options.replace_autocast:
            model.leave(why.OWN_AUTOCAST)
        elif reason := self._why_without_scale(model):
            self._wait(model, reason)
        elif model.is_trained and self.times.may_convert(model.calls):
            self._convert(model)

    def _why_without_scale(self, model: Model) -> str:
        """Return why the loss of a trained model cannot be scaled, as fp16 needs it; "" if it can, or by the script."""
        if not why.needs_scale(self.options.policy) or (model.in_autocast and why.script_scales()):
            return ""
        module = model.ref()
        return self.scaling.why_not(module) if model.is_trained and module is not None else ""

    def _wait(self, model: Model, reason: str) -> None:
        """Leave a model for good, or until an optimizer has made a step."""
        if reason == why.NO_STEP:
            model.reason = reason
        else:
            model.leave(reason)

    def _give_up_fp16(self, reason: str) -> None:
        """Revert the models whose losses were scaled, as that cannot go on."""
        for model in self.seen:
            if model.converted is not None and model.is_scaled:
                importlib.import_module("amp_graph.run.conversions").undo(model.converted)
                model.converted = None
                model.leave(f"{reason}; in fp16 until then")

    def _is_to_be_watched(self, model: Model) -> bool:
        looks = model.calls <= LOOKED_AT or model.calls % 16 == 0
        return looks and torch.is_grad_enabled() and not in_transform()

    def _watch(self, model: Model) -> None:
        """Have the parameters tell when a backward reaches them: ``backward()`` as well as ``autograd.grad``."""
        module = model.ref()
        if module is None:
            return

        def is_reached(gradient: torch.Tensor) -> None:
            model.is_trained = True

        model.parameters = sum(p.numel() for p in module.parameters() if not torch.nn.parameter.is_lazy(p))
        model.hooks += [
            p.register_hook(is_reached)
            for p in module.parameters()
            if p.requires_grad and p.is_leaf and not torch.nn.parameter.is_lazy(p)
        ]

    def _convert(self, model: Model) -> None:
        model.unhook()
        module = model.ref()
        if module is None:
            return
        conversions = importlib.import_module("amp_graph.run.conversions")
        if self.options.dry_run:
            why_not = conversions.why_not(module, self.options)
            model.state, model.reason = (State.LEFT, why_not) if why_not else (State.CONVERTED, "")
            return
        if conversions.is_part_of_converted(module):
            model.state = State.PART
            return
        for other in self._inside(module):
            conversions.undo(other.converted)
            other.state, other.converted = State.PART, None
        made: Converted | str = conversions.convert_trained(module, self.options, self.note)
        if isinstance(made, str):
            model.leave(made)
        else:
            model.state, model.converted, model.reason = State.CONVERTED, made, ""
            if why.needs_scale(self.options.policy) and not model.in_autocast:
                model.is_scaled = True
                self.scaling.begin(module, conversions.OwnScale)
            made.changed = self.times.captured
            self._take_parts({id(part) for part in made.modules()} - {id(why.inner_of(module))})

    def _take_parts(self, parts: set[int]) -> None:
        """Leave the parts of a model that was just converted to it."""
        for other in self.seen:
            part = other.ref()
            if other.state is State.WATCHED and part is not None and id(part) in parts:
                other.state = State.PART
                other.unhook()

    def _inside(self, module: torch.nn.Module) -> list[Model]:
        """Return the converted models that are submodules of ``module``: the outermost module is converted."""
        parts = {id(part) for part in why.inner_of(module).modules()}
        found = {id(m): m for m, _ in self._by_id.values() if m.converted is not None}
        return [m for m in found.values() if (inner := m.ref()) is not None and id(why.inner_of(inner)) in parts]

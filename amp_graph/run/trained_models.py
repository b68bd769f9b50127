"""Decides which models are converted: those that are called outermost and whose parameters receive gradients.

The first calls run as written. A hook on each parameter tells that a backward reached it; the model is then converted
at its next call outside of a backward. Outermost calls are seen by a wrapper of ``torch.nn.Module.__call__``.
"""

from __future__ import annotations

import enum
import importlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.autograd import in_backward
from amp_graph.passes.torch_compat.dispatch import being_traced, has_modes, in_transform, is_autocast_on
from amp_graph.passes.torch_compat.fully_sharded import gathered_parameters
from amp_graph.run import eligibility as why
from amp_graph.run.call_site import is_checkpointed_call, site_of_call
from amp_graph.run.loss_scaling import LossScaling
from amp_graph.run.options import RunOptions

if TYPE_CHECKING:
    from amp_graph.report.model_report import Report


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
    parameters: int = 0
    site: str = ""
    state: State = State.WATCHED
    reason: str = ""
    is_trained: bool = False
    saw_gradients: bool = False  # called with gradients enabled
    is_scaled: bool = False  # in fp16, with a scale of ours
    in_autocast: bool = False  # its present call is under the script's torch.autocast
    hooks: list[Any] = field(default_factory=list)
    is_converted: bool = False
    graphs: int = 0  # of which its newest report tells
    report: Report | None = None

    def become(self, state: State, reason: str = "") -> None:
        """Take its last state, and watch it no longer."""
        self.state, self.reason, self.is_converted = state, reason, False
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def why_not_converted(self) -> str:
        """Return why it was left as written."""
        untrained = why.NEVER_TRAINED if self.hooks else why.FROZEN
        return self.reason or (untrained if self.saw_gradients else why.NO_GRADIENTS)


class TrainedModels:
    """All models that the script has called, by identity; told of calls by ``hear``."""

    def __init__(self, options: RunOptions, note: Callable[[str], None]) -> None:
        """Know no model yet."""
        self.options, self.note = options, note
        self.scaling = LossScaling(self._give_up_fp16)
        self.seen: list[Model] = []
        self._by_id: dict[int, Model] = {}
        self._off = False
        self.conversions: Any = None  # the room that imports Dynamo, from the first conversion on
        os.register_at_fork(after_in_child=self.stop)

    def stop(self) -> None:
        """Convert nothing from now on."""
        self._off = True

    # -- told of calls --------------------------------------------------------------------------------

    def before(self, module: torch.nn.Module) -> Model | None:
        """Take note of a call of ``module``, and convert it if it is known to be trained."""
        if self._off:
            return None
        model = self._by_id.get(id(module)) or self._first_seen(module)
        if model.state is State.WATCHED:
            self._advance(model, module)
        return model

    def under_autocast(self, model: Model) -> None:
        """Leave a model whose forward has autocast regions of its own."""
        if model.state is State.WATCHED and not model.in_autocast:
            model.become(State.LEFT, why.INNER_AUTOCAST)

    def after(self, model: Model, given: Any, result: Any) -> None:
        """Watch the parameters of a model after its call; count the graphs of a converted one."""
        if model.is_converted:
            self.conversions.refresh(model)
        elif model.state is State.WATCHED and not model.hooks and torch.is_grad_enabled() and not in_transform():
            self._watch(model)

    def failed(self, error: Exception) -> None:
        """Convert nothing more after an error of our own; the script goes on."""
        self.stop()
        self.note(f"nothing more is converted, as amp-graph run itself failed: {type(error).__name__}: {error}")

    # -- on the way -----------------------------------------------------------------------------------

    def _first_seen(self, module: torch.nn.Module) -> Model:
        model = self._by_id[id(module)] = Model(weakref.ref(module), why.kind_of(module))
        weakref.finalize(module, self._by_id.pop, id(module), None).atexit = False
        if next(module.parameters(), None) is None:
            model.state = State.PART
            return model
        model.site, model.parameters = site_of_call(), _size_of(module)
        self.seen.append(model)
        if reason := why.why_left(module, self.options.policy):
            model.become(State.LEFT, reason)
            self.scaling.leave(module)
        elif is_checkpointed_call():
            model.become(State.LEFT, why.CHECKPOINTED)
        elif any(
            part is module
            for m in self.seen
            if m.is_converted and (whole := m.ref()) is not None
            for part in whole.modules()
        ):
            model.state = State.PART
        return model

    def _advance(self, model: Model, module: torch.nn.Module) -> None:
        model.in_autocast = is_autocast_on()
        if not torch.is_grad_enabled() or in_transform() or being_traced() or has_modes():
            return
        if not model.saw_gradients:
            model.saw_gradients, model.site = True, site_of_call()
        if model.in_autocast and not self.options.replace_autocast:
            model.become(State.LEFT, why.OWN_AUTOCAST)
        elif model.is_trained:
            own_scale = why.needs_scale(self.options.policy) and not (model.in_autocast and why.script_scales())
            model.reason = self.scaling.why_not(module) if own_scale else ""
            if model.reason == "":
                model.is_scaled = own_scale
                self._convert(model, module)
            elif model.reason != why.NO_STEP:
                model.become(State.LEFT, model.reason)

    def _give_up_fp16(self, reason: str) -> None:
        """Revert the models whose losses were scaled, as that cannot go on."""
        for model in self.seen:
            if model.is_converted and model.is_scaled:
                self.conversions.undo(model)
                model.become(State.LEFT, f"{reason}; in fp16 until then")

    def _watch(self, model: Model) -> None:
        """Have the parameters tell when a backward reaches them: ``backward()`` as well as ``autograd.grad``."""
        module: Any = model.ref()  # it is being called

        def is_reached(gradient: torch.Tensor) -> None:
            model.is_trained = True

        model.parameters = _size_of(module)  # without those that were lazy before the call
        model.hooks += [
            p.register_hook(is_reached)
            for p in (*module.parameters(), *gathered_parameters(module))
            if p.requires_grad and p.is_leaf and not torch.nn.parameter.is_lazy(p)
        ]

    def _convert(self, model: Model, module: torch.nn.Module) -> None:
        model.become(State.CONVERTED)
        conversions = self.conversions = importlib.import_module("amp_graph.run.conversions")
        if self.options.dry_run:
            if reason := conversions.why_not(module, self.options):
                model.become(State.LEFT, reason)
            return
        if conversions.whole_of(why.inner_of(module)) is not None:
            model.become(State.PART)
            return
        parts = {id(part) for part in why.inner_of(module).modules()}
        others = ((m, m.ref()) for m in self.seen if m is not model)
        inside = [m for m, other in others if other is not None and id(why.inner_of(other)) in parts]
        for other in inside:  # the outermost module is converted
            if other.is_converted:
                conversions.undo(other)
                other.become(State.PART)
        if reason := conversions.convert_trained(module, self.options):
            model.become(State.LEFT, reason)
            return
        model.is_converted = True
        if model.is_scaled:
            self.scaling.begin(conversions.LossScale)
        for other in inside:
            if other.state is State.WATCHED:
                other.become(State.PART)


def _size_of(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if not torch.nn.parameter.is_lazy(p))


# -- outermost calls ----------------------------------------------------------------------------------


class _Thread(threading.local):
    inside = False
    seen: Model | None = None


def hear(
    before: Callable[[torch.nn.Module], Any],
    after: Callable[[Any, Any, Any], None],
    under_autocast: Callable[[Any], None],
    failed: Callable[[Exception], None],
) -> Callable[[], None]:
    """Tell of all outermost calls from now on; the result ends that.

    before: called with the module; what it returns, if not None, stands for the call from then on. after: called with
    that, with what the module was given, (args, kwargs), and with the result. under_autocast: called with it where a
    part of the model runs under autocast. failed: called with what one of these raised.

    Dynamo must be imported later than this: it takes the present ``Module.__call__`` for torch's own, and does not
    trace it.
    """
    plain: Callable[..., Any] = torch.nn.Module.__call__
    thread = _Thread()

    def tell(what: Callable[[], Any]) -> Any:
        with Attempt() as tried:
            return what()
        if tried.error is not None:
            failed(tried.error)
        return None

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if thread.seen is not None and not is_compiling() and is_autocast_on():
            under_autocast(thread.seen)
        # In backward, a checkpoint recomputes a part of what was seen.
        if is_compiling() or thread.inside or in_backward():
            return plain(self, *args, **kwargs)
        thread.inside = True
        try:
            seen = thread.seen = tell(lambda: before(self))
            result = plain(self, *args, **kwargs)
            if seen is not None:
                tell(lambda: after(seen, (args, kwargs), result))
            return result
        finally:
            thread.inside, thread.seen = False, None

    torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def end() -> None:
        if torch.nn.Module.__call__ is __call__:
            torch.nn.Module.__call__ = plain  # type: ignore[method-assign]

    return end

"""Runs an audit beside a training: decides which steps are looked at, and tells the watchers what happens.

``with Audit() as audit: train()``, then ``audit.report()``. A step ends when the optimizer that stepped first steps
again, or when a GradScaler skips it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.events import hear
from amp_graph.audit.operations import Operations
from amp_graph.audit.records import Call, Event, Places, Region, Training, Watcher
from amp_graph.audit.silence import ignored_codes, loud
from amp_graph.audit.watchers import WATCHERS
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dispatch import has_modes
from amp_graph.passes.torch_compat.modules import is_compiled
from amp_graph.passes.torch_compat.optimizers import on_every_optimizer_step
from amp_graph.report.report_text import folded_paths

LOOKS = (2, 3)  # the first step allocates state, and is unlike the others


class StepsAreOver(BaseException):
    """Ends a script after the number of steps that was asked for; no ``except Exception`` of the script takes it."""


class Audit:
    """Looks at a training, and changes no bit of it; ``report()`` is what it saw.

    ``model``, ``optimizer``, ``scaler``: have their names in the report from the start; others are seen as they are
    called. ``every``: look at each step whose number it divides, beside those of ``looks``; 0 for these alone.
    ``stop_after``: raise ``StepsAreOver`` when that many steps have ended. ``ignore``: codes to leave out, beside the
    ``ignore`` of ``[tool.amp_graph.audit]`` in pyproject.toml of the current folder.

    Raises AmpGraphError for a negative number, and for a code that does not exist.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        *,
        every: int = 0,
        looks: Collection[int] = LOOKS,
        stop_after: int = 0,
        ignore: Collection[str] = (),
    ) -> None:
        if every < 0 or stop_after < 0:
            raise AmpGraphError(
                f"audit: every={every}, stop_after={stop_after}\n  legal: numbers of steps, 0 or more\n"
                "  fix:   audit(every=100)"
            )
        self.every, self.looks, self.stop_after = every, looks, stop_after
        self._folder = Path.cwd()  # of the findings' places; a script may change it
        self.ignored = ignored_codes(ignore, self._folder)
        self.training = Training()
        if model is not None:
            self.training.add_model(model)
        self.training.optimizers.update(() if optimizer is None else (optimizer,))
        self.watchers: list[Watcher] = [kind(self.training) for kind in WATCHERS]
        self.seconds: dict[int, float] = {}  # that each step took
        self._places = Places()
        self._lead: Optimizer | None = None
        self._ended = 0  # steps that had ended when the running step of a scaler began
        self._look: Operations | None = None
        self._began = 0.0
        self._undo: list[Callable[[], None]] = []

    # -- on and off -----------------------------------------------------------------------------------

    def __enter__(self) -> Audit:
        """Begin."""
        self._undo = [on_every_optimizer_step(self._before_update, self._after_update), hear(self._heard)]
        self._begin_step()
        return self

    def __exit__(self, *error: object) -> None:
        """End; what was raised goes on."""
        self.stop()

    def stop(self) -> None:
        """End: nothing of torch is replaced any more."""
        self._end_look()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def report(self) -> AuditReport:
        """Return what was seen so far."""
        findings = []
        for watcher in self.watchers:
            with Attempt() as tried:
                findings += list(watcher.findings())
            self._failed(watcher, tried)
        kept, wrong = loud(findings, self.ignored, self._folder)
        self.training.unseen |= dict.fromkeys([*wrong, *self._compiled(), *_other_ranks()])
        return AuditReport.of(self.training, kept, self.seconds, len(findings) - len(kept))

    def _compiled(self) -> Iterator[str]:
        for model in list(self.training.models):
            names = [name for name, part in model.named_modules() if is_compiled(part)]
            if names:
                yield f"the operations of compiled modules: {folded_paths(names)} of {type(model).__name__}"

    # -- steps ----------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        number = self.training.steps + 1
        if number in self.looks or (self.every and number % self.every == 0):
            if has_modes():
                self.training.unseen[f"step {number}: another dispatch mode was on"] = None
            else:
                self.training.looked_at.append(number)
                self._look = Operations(self.training, self._places, self._tell)
                self._look.__enter__()
        self._began = time.perf_counter()

    def _end_step(self) -> None:
        self._end_look()
        self.training.steps += 1
        self.seconds[self.training.steps] = time.perf_counter() - self._began
        if self.training.steps == self.stop_after:
            raise StepsAreOver
        self._begin_step()

    def _end_look(self) -> None:
        if self._look is not None:
            self._look.__exit__(None, None, None)
            self._look = None

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.training.optimizers.add(optimizer)
        self._lead = self._lead or optimizer
        if self._look is None:
            return None
        self._look.updates += 1
        self._quietly(lambda watcher: watcher.updating(optimizer))
        given = [self._outside_of_update(self._look, one) for one in args]
        return tuple(given), {name: self._outside_of_update(self._look, one) for name, one in kwargs.items()}

    def _outside_of_update(self, look: Operations, given: Any) -> Any:
        """Return a closure as one whose operations are no part of the update; anything else as it is."""
        if not callable(given) or isinstance(given, Optimizer):
            return given

        @functools.wraps(given)
        def closure() -> Any:
            look.updates -= 1
            try:
                return given()
            finally:
                look.updates += 1

        return closure

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._look is not None:
            self.training.gradients |= {
                id(p): (str(p.grad.dtype).removeprefix("torch."), p.grad.numel() * p.grad.element_size())
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            }
            self._quietly(lambda watcher: watcher.updated(optimizer))
            self._look.updates -= 1
        if optimizer is self._lead:
            self._end_step()

    # -- what happens ---------------------------------------------------------------------------------

    def _heard(self, name: str, arguments: Mapping[str, Any], caller: FrameType, is_after: bool, result: Any) -> None:
        place = self._places.of(caller)
        if name == "autocast.enter" and is_after:
            self._enter_region(arguments["self"], place)
        elif name == "autocast.exit" and not is_after and self.training.open:
            self.training.open.pop()
        elif name == "backward" and not is_after and self._look is not None:
            with Attempt() as tried:
                self._look.count_saved(arguments["tensors"])
            if tried.error is not None:
                self.training.unseen[f"activations that are saved for backward: {tried.reason}"] = None
        elif name == "compile" and not is_after:
            self.training.unseen[f"{place}: the operations of what is compiled here"] = None
        event = Event(name, arguments, place, is_after, self.training.steps, result)
        self._quietly(lambda watcher: watcher.heard(event))
        if name == "scaler.step":
            self._scaled_step(arguments["optimizer"], is_after)

    def _scaled_step(self, optimizer: Optimizer, is_after: bool) -> None:
        """End the step also where the scaler left the update out, as gradients were infinite."""
        self._lead = self._lead or optimizer
        if not is_after:
            self._ended = self.training.steps
        elif optimizer is self._lead and self._ended == self.training.steps:
            self._end_step()

    def _enter_region(self, region: torch.autocast, place: Any) -> None:
        outer = self.training.open[-1] if self.training.open else -1
        made = Region(
            place, region.device, str(torch.get_autocast_dtype(region.device)).removeprefix("torch."),
            torch.is_autocast_enabled(region.device), outer,
        )  # fmt: skip
        known = [i for i, r in enumerate(self.training.regions) if r.key == made.key]
        if not known:
            self.training.regions.append(made)
        number = known[0] if known else len(self.training.regions) - 1
        self.training.open.append(number)
        self.training.regions[number].entered += 1
        self.training.regions[number].looked_at += self._look is not None

    def _tell(
        self, what: str, call: Call, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if what == "before":
            self._quietly(lambda watcher: watcher.before(call, func, args, kwargs))
        else:
            self._quietly(lambda watcher: watcher.ran(call, func, args, kwargs, result))

    def _quietly(self, tell: Callable[[Watcher], None]) -> None:
        """Tell each watcher; what one raises ends it."""
        for watcher in self.watchers:
            with Attempt() as tried:
                tell(watcher)
            self._failed(watcher, tried)

    def _failed(self, watcher: Watcher, tried: Attempt) -> None:
        if tried.error is not None:
            self.watchers = [one for one in self.watchers if one is not watcher]
            self.training.unseen[f"{type(watcher).__name__} ended: {tried.reason}"] = None


def _other_ranks() -> Iterator[str]:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        yield f"this is rank {rank} of {size}: what others do alone"


audit = Audit  # what users call

"""Runs an audit beside a training: decides which steps are looked at, and tells the watchers what happens.

``with Audit() as audit: train()``, then ``audit.report()``. A step ends when the optimizer that stepped first has
stepped, or a GradScaler has left its update out.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from amp_graph.audit.audit_report import AuditReport
from amp_graph.audit.events import hear
from amp_graph.audit.operations import Operations
from amp_graph.audit.precision_table import take_stock
from amp_graph.audit.records import NOWHERE, Event, Finding, Place, Region, Training, Watcher, dtype_name
from amp_graph.audit.silence import ignored_codes, loud, unknown_codes
from amp_graph.audit.speed.plan import draw_sketches
from amp_graph.audit.watchers import WATCHERS
from amp_graph.errors import AmpGraphError
from amp_graph.lists.errors import Attempt
from amp_graph.passes.torch_compat.dispatch import has_modes
from amp_graph.passes.torch_compat.modules import is_compiled
from amp_graph.passes.torch_compat.optimizers import on_every_optimizer_step
from amp_graph.report.report_text import folded_paths
from amp_graph.run.script import StepsAreOver
from amp_graph.step.train_step import TrainStep

LOOKS = (2, 3)  # the first step allocates state, and is unlike the others
MOST_TIMED = 10_000  # steps whose time is kept
EVALUATIONS = 3  # calls of ``eval()`` after which it is looked for a model's call in evaluation, until one is seen
AFTER_SKIPS = 3  # steps that are looked at because a scaler skipped the one before: it often skips several in a row


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
        self._lead: weakref.ref[Optimizer] | None = None
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that stepped in this step
        self._ended = 0  # steps that had ended when the running step of a scaler began
        self._look: Operations | None = None
        self._after_skips = AFTER_SKIPS  # that may still be looked at
        self._evaluations = EVALUATIONS
        self._evaluates = False  # whether the look is at a call in evaluation
        self._thread = threading.get_ident()  # a mode is on in one thread
        self._made: weakref.WeakKeyDictionary[torch.autocast, tuple[Place, bool]] = weakref.WeakKeyDictionary()
        self._began = 0.0
        self._undo = contextlib.ExitStack()

    # -- on and off -----------------------------------------------------------------------------------

    def __enter__(self) -> Audit:
        """Begin."""
        self._undo.callback(on_every_optimizer_step(self._before_update, self._after_update))
        self._undo.callback(hear(self._heard))
        self._begin_step()
        return self

    def __exit__(self, *error: object) -> None:
        """End; what was raised goes on."""
        self.stop()

    def stop(self) -> None:
        """End: nothing of torch is replaced any more. What ran since the last step is no step, unless it trained."""
        self._end_look(ended=False)
        self._undo.close()

    def report(self) -> AuditReport:
        """Return what was seen so far."""
        draw_sketches(self.training)
        self._take_stock(is_over=True)
        findings: list[Finding] = []
        self._quietly(lambda watcher: findings.extend(watcher.findings()))
        kept = loud(findings, self.ignored, self._folder)
        rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        others = () if size == "1" else (f"this is rank {rank} of {size}: what others do alone",)
        self.training.unseen |= dict.fromkeys([*unknown_codes(self.training.places.files, self._folder), *others])
        return AuditReport.of(
            self.training, kept, self.seconds, silenced=len(findings) - len(kept), looks=sorted(self.looks),
            every=self.every,
        )  # fmt: skip

    def _take_stock(self, *, is_over: bool = False) -> None:
        """Note what models and optimizers keep, and which modules are compiled."""
        with Attempt() as tried:
            take_stock(self.training, is_over=is_over)
            for model in list(self.training.models):
                if names := [name for name, part in model.named_modules() if is_compiled(part)]:
                    where = f"{folded_paths(names)} of {type(model).__name__}"
                    self.training.unseen[f"the operations of compiled modules: {where}"] = None
        if tried.error is not None:
            self.training.unseen[f"what models and optimizers keep: {tried.reason}"] = None

    # -- steps ----------------------------------------------------------------------------------------

    def _begin_step(self, *, after_skip: bool = False) -> None:
        number, again = self.training.steps + 1, after_skip and self._after_skips > 0
        self._after_skips -= again
        if again or number in self.looks or (self.every and number % self.every == 0):
            if has_modes():
                self.training.unseen[f"step {number}: another dispatch mode was on"] = None
            else:
                self.training.looked_at.append(number)
                self._begin_look()
        self._began = time.perf_counter()

    def _begin_look(self) -> None:
        self._look = Operations(self.training, self._quietly, self._heard)
        self._look.__enter__()
        self._quietly(lambda watcher: watcher.began())

    def _look_for_evaluation(self) -> None:
        """Look at the next call of a model, if none was seen in evaluation: it may be outside of all regions."""
        is_due = self._evaluations > 0 and self.training.steps >= max(self.looks, default=1)
        if is_due and self._look is None and threading.get_ident() == self._thread and not has_modes():
            self._evaluations, self._evaluates = self._evaluations - 1, True
            self._begin_look()

    def _see_call(self, model: torch.nn.Module | None) -> None:
        """Take the call of a model that was looked for, None as it ends; one that trains is none in evaluation."""
        if self._look is not None and model is None:
            self._look.is_over = True
        elif model is not None and not (model.training and torch.is_grad_enabled()):
            self._evaluations, self.training.evaluated = 0, self.training.steps

    def _end_step(self, *, skipped: bool = False) -> None:
        self._end_look()
        self._others.clear()
        self.training.steps += 1
        if self.training.steps in self.training.looked_at or len(self.seconds) < MOST_TIMED:
            self.seconds[self.training.steps] = time.perf_counter() - self._began
        if self.training.steps in self.training.looked_at:  # before a function returns that has the models
            self._take_stock()
        draw_sketches(self.training)
        if self.training.steps == self.stop_after:
            raise StepsAreOver
        self._begin_step(after_skip=skipped)

    def _end_look(self, *, ended: bool = True) -> None:
        look, self._look = self._look, None
        is_step, self._evaluates = not self._evaluates, False
        if look is not None:
            look.__exit__(None, None, None)
            if is_step and not look.is_training and (look.ran_graph or not ended):
                self.training.looked_at.pop()

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Tell of an update that is looked at; one with a closure has its gradients when that has run."""
        self.training.optimizers.add(optimizer)
        self.training.updates += 1
        if self._evaluates:
            self._end_look()
        if self._look is None:
            return None
        self._look.updates += 1
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._updating(optimizer)
            return None
        calls = 0

        def told() -> Any:
            nonlocal calls
            loss, calls = closure(), calls + 1
            if calls == 1:  # LBFGS calls it again and again
                self._updating(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": told}

    def _updating(self, optimizer: Optimizer) -> None:
        """Note the dtypes of the gradients of an update that is looked at, and tell of it."""
        self.training.gradients |= {
            id(p): (dtype_name(p.grad.dtype), p.grad.numel() * p.grad.element_size())
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        }
        if self._look is not None:  # another optimizer may step in a closure, and end the step
            with self._look.watching():
                self._quietly(lambda watcher: watcher.updating(optimizer))

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._look is not None:
            with self._look.watching():
                self._quietly(lambda watcher: watcher.updated(optimizer))
            self._look.updates -= 1
        if self._leads(optimizer):
            self._end_step()

    def _leads(self, optimizer: Optimizer) -> bool:
        """Say whether the update of ``optimizer`` ends a step: of the first one, or of one that steps twice in it."""
        if self._lead is None or optimizer in self._others:
            self._lead = weakref.ref(optimizer)
        self._others.add(optimizer)
        return self._lead() is optimizer

    # -- what happens ---------------------------------------------------------------------------------

    def _heard(self, name: str, arguments: Mapping[str, Any], caller: FrameType, is_after: bool, result: Any) -> None:
        """Take a call that ``events`` heard; no error of ours reaches the script."""
        with Attempt() as tried:
            self._take(name, arguments, caller, is_after, result)
        if tried.error is not None:
            self.training.unseen[f"{name}: {tried.reason}"] = None
        if name == "scaler.step":
            self._step_of(arguments["optimizer"], is_after, skipped=True)
        elif name == "train_step":
            self._train_step(arguments["self"], is_after)

    def _take(self, name: str, arguments: Mapping[str, Any], caller: FrameType, is_after: bool, result: Any) -> None:
        place = self.training.places.of(caller)
        if name == "autocast.made" and not is_after:
            asked = bool(arguments.get("enabled", True))
            self._made[arguments["self"]] = (NOWHERE if _is_of_torch(caller) else place, asked)
        elif name == "autocast.enter" and is_after:
            made, asked = self._made.get(arguments["self"], (place, True))
            # A decorated function enters its region wherever it is called.
            self._enter_region(arguments["self"], made if made.file and _is_of_torch(caller) else place, made, asked)
        elif name == "autocast.exit" and not is_after and self.training.open:
            self.training.open.pop()
        elif name == "train_step" and not is_after:
            self.training.unseen[f"{place}: what a TrainStep runs: print(amp_graph.report(step).text())"] = None
        elif name == "compile" and not is_after:
            self.training.unseen[f"{place}: the operations of what is compiled here"] = None
        elif name == "eval" and is_after:
            self._look_for_evaluation()
        elif name == "model.call" and self._evaluates:
            self._see_call(arguments.get("self"))
        is_off = name.startswith("scaler.") and not arguments["self"].is_enabled()
        if name == "scaler.scale" and not is_off:
            self.training.scaled.add(place)
        event = Event(f"disabled {name}" if is_off else name, arguments, place, is_after, self.training.steps, result)
        self._quietly(lambda watcher: watcher.heard(event))
        if name == "backward" and not is_after and self._look is not None and not self._evaluates:
            self._look.count_saved(arguments["tensors"])

    def _train_step(self, step: TrainStep, is_after: bool) -> None:
        """Take a forward, backward and update in one graph: not its operations, which have no phase in a graph."""
        if not is_after:
            self.training.add_model(step.model)
            self.training.optimizers.update(one for one in (step.optimizer,) if isinstance(one, Optimizer))
        if self._look is not None:
            self._look.is_paused, self._look.ran_graph = not is_after, True
        self._step_of(step.optimizer, is_after)

    def _step_of(self, optimizer: Optimizer, is_after: bool, *, skipped: bool = False) -> None:
        """End the step also where no update was seen: a scaler left it out, or it was in a graph."""
        if not is_after:
            self._ended = self.training.steps
        elif optimizer not in self._others and self._ended == self.training.steps and self._leads(optimizer):
            self._end_step(skipped=skipped)

    def _enter_region(self, entering: torch.autocast, place: Place, made: Place, asked: bool) -> None:
        outer = self.training.open[-1] if self.training.open else -1
        entered = Region(
            place, entering.device, dtype_name(torch.get_autocast_dtype(entering.device)),
            torch.is_autocast_enabled(entering.device), outer, made=made, asked=asked,
        )  # fmt: skip
        if entered not in self.training.regions:
            self.training.regions.append(entered)
        self.training.open.append(self.training.regions.index(entered))
        region = self.training.regions[self.training.open[-1]]
        region.entered += 1
        region.looked_at += self._look is not None and not self._look.is_over

    def _quietly(self, tell: Callable[[Watcher], None]) -> None:
        """Tell each watcher; what one raises ends it."""
        for watcher in self.watchers:
            with Attempt() as tried:
                tell(watcher)
            if tried.error is not None:
                self.watchers = [one for one in self.watchers if one is not watcher]
                self.training.unseen[f"{type(watcher).__name__} ended: {tried.reason}"] = None


def _is_of_torch(frame: FrameType) -> bool:
    """Say whether torch called for itself; not a class of its own that the user called."""

    def is_torchs(one: FrameType) -> bool:
        return str(one.f_globals.get("__name__", "")).partition(".")[0] == "torch"

    while is_torchs(frame) and frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    return is_torchs(frame)


audit = Audit  # what users call

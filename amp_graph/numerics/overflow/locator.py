"""``Locator``: watches a training, and locates what made the gradients of a skipped step infinite.

Before: ``skipped_steps`` grows, and nobody knows why. After: ``locator.results``, and causes in ``scale_history``.

Nothing is checked that the step does not check anyway: its verdict, the count of skipped steps, is read. On the CPU at
once; on CUDA by a copy that is looked at when a later step begins, so that no step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from amp_graph.errors import CaptureError, warn
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.model_state import RandomState
from amp_graph.numerics.overflow.locate import located, task_of
from amp_graph.numerics.overflow.result import Located
from amp_graph.numerics.overflow.run import Task
from amp_graph.numerics.overflow.scale_history import loss_scale_of_source
from amp_graph.numerics.overflow.verdicts import Call, Kept, Verdicts
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.train_step import TrainStep

LIMIT = 3
SLOTS = 4  # steps on CUDA whose verdicts may be in flight
CALLS = 8  # of the model in one step of a loop, as in gradient accumulation; of more, the last


class Locator:
    """Watches a ``TrainStep``, or a converted model and its ``GradScaler``, and locates the causes of skipped steps.

    ``locator = amp_graph.Locator(step)``, or ``amp_graph.Locator(model, scaler)``, before the training; then
    ``print(locator)``, ``locator.results``, ``amp_graph.scale_history(step)``. ``detach()`` ends it. target: a
    ``TrainStep``, or a converted model. scaler: the model's ``amp_graph.GradScaler``.

    When a step was skipped, its forward and backward run again, checked (see ``locate``), with its batch, random state
    and scale; a skipped step has changed no parameter, so the result is that step's. In a loop of your own, the
    gradients of the model's outputs are kept instead of the loss. ``limit``: how many skipped steps are run again, as a
    dynamic scale overflows now and then by design; further ones are counted. A result whose place was not seen before
    is a warning, unless a few backoffs of the scale end it.

    Kept alive: on the CPU, the batch of the running step. On CUDA the batches of up to 4 steps, until their verdicts
    arrive; if a verdict arrives after another step has begun, ``exact`` of its result is False, and if four are in
    flight, a step is not watched (``missed``). Buffers, such as running means, are as the step left them.

    Raises CaptureError for what has no loss scale: without one, a step with infinite gradients is not skipped.
    ``loss_scale=1.0`` checks and skips without scaling.
    """

    def __init__(self, target: Any, scaler: GradScaler | None = None, *, limit: int = LIMIT) -> None:
        """Start to watch."""
        if type(limit) is not int or limit < 1:
            raise CaptureError(f"Locator: limit={limit!r}\n  legal: a whole number, 1 or more\n  fix:   limit={LIMIT}")
        self.limit, self.results, self.missed, self.skips, self.replays = limit, list[Located](), 0, 0, 0
        self._waiting: deque[Kept] = deque()
        self._calls: list[Call] = []
        self._dropped = 0
        self._random: Any = None
        self._batch: tuple[Any, ...] = ()
        self._detach: list[Callable[[], None]] = []
        if isinstance(target, TrainStep):
            self._scale = self._of(target, target)
            self._detach.append(target.watch(self))
        elif isinstance(target, torch.nn.Module) and isinstance(scaler, GradScaler):
            self._scale = self._of(scaler, scaler)
            self._watch_loop(target, scaler)
        else:
            raise CaptureError(
                f"Locator: a {type(target).__name__} {'without' if scaler is None else 'with'} a GradScaler of ours\n"
                "  legal: a TrainStep; a converted model and its amp_graph.GradScaler\n"
                "  fix:   amp_graph.Locator(model, scaler)"
            )
        self._target, self._verdicts = target, Verdicts(self._scale)

    def _of(self, source: Any, owner: Any) -> LossScale:
        if isinstance(source, TrainStep) and source.loss_scale is None:
            raise CaptureError(
                "Locator: the step has no loss scale, so it does not check its gradients\n"
                "  legal: a TrainStep with a loss scale; 1.0 checks, and skips bad steps, without scaling\n"
                "  fix:   TrainStep(model, loss_fn, optimizer, policy, loss_scale=1.0)"
            )
        return loss_scale_of_source(source)

    # -- a TrainStep ------------------------------------------------------------------------------------

    def before(self, batch: Sequence[Any]) -> None:
        """A step of ``batch`` begins."""
        self._look()
        self._batch, self._random = tuple(batch), RandomState()

    def after(self) -> None:
        """That step is over."""
        step, batch, random = self._target, self._batch, self._random
        self._batch = ()

        def tasks(scale: float) -> list[Task]:
            return [replace(task_of(step, batch, None, None, scale), random=random)]

        self._ended(Kept(self._scale.records.count, tasks))

    # -- a loop of the user's ----------------------------------------------------------------------------

    def _watch_loop(self, model: torch.nn.Module, scaler: GradScaler) -> None:
        first = model.register_forward_pre_hook(self._called, with_kwargs=True)
        last = model.register_forward_hook(self._returned, with_kwargs=True)
        scaler.watch(self._updated)
        self._detach += [first.remove, last.remove, lambda: scaler.watch(None)]

    def _called(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if not self._calls:
                self._look()
            self._dropped += len(self._calls) == CALLS
            self._calls = [*self._calls[1 - CALLS :], Call(args, kwargs, RandomState())]

    def _returned(self, model: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._calls and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._calls[-1].watch(result)

    def _updated(self) -> None:
        model, calls = self._target, [call for call in self._calls if call.take_gradients()]
        self._calls, dropped, self._dropped = [], self._dropped, 0
        if not calls:
            return

        def tasks(scale: float) -> list[Task]:
            own = task_of(model, (torch.zeros(()),), None, None, scale)
            how = [(((call.args, call.kwargs),), call) for call in calls]
            return [replace(own, parts=(p,), random=c.random, outputs_gradients=c.gradients) for p, c in how]

        self._ended(Kept(self._scale.records.count, tasks, dropped))

    # -- verdicts -------------------------------------------------------------------------------------------

    def _ended(self, kept: Kept) -> None:
        if len(self._waiting) >= SLOTS:
            self.missed += 1
            return
        skipped = self._verdicts.end(kept)
        if skipped is None:
            self._waiting.append(kept)
        elif skipped:
            self._run_again(kept, exact=True)

    def _look(self) -> None:
        """Read the verdicts that have arrived."""
        while self._waiting:
            skipped = self._verdicts.arrived(self._waiting[0])
            if skipped is None:
                return
            kept = self._waiting.popleft()
            if skipped:
                self._run_again(kept, exact=kept.number == self._scale.records.count)

    def _run_again(self, kept: Kept, exact: bool) -> None:
        self.skips += 1
        if self.replays >= self.limit:
            self._explain(kept, f"not located: {self.limit} skipped steps were")
            return
        self.replays += 1
        with Attempt() as tried:  # the training goes on
            found = next((one for task in kept.tasks(kept.scale) if (one := located(task, try_fix=True))), None)
        if tried.error is not None:
            told = first_line(tried.error)
            self._explain(kept, f"not located: {tried.reason}")
            warn(f"amp_graph: Locator: step {kept.number} was skipped and could not be run again: {told}")
            return
        if found is None:
            again = f"its last {CALLS} calls of the model were" if kept.dropped else "the step was"
            before = f", {kept.dropped} calls before them were not" if kept.dropped else ""
            self._explain(kept, f"not located: all was finite when {again} run again{before}")
            return
        found = replace(found, exact=exact)
        self._explain(kept, found.cause)
        if all(_place(found) != _place(known) for known in self.results):
            self.results.append(found)
            if not found.is_ordinary:
                warn(f"amp_graph: step {kept.number} was skipped: {found.text().rstrip()}")

    def _explain(self, kept: Kept, cause: str) -> None:
        self._scale.records.explain(kept.number, cause)

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self) -> list[Located]:
        """Return the results, after waiting for verdicts that are in flight on CUDA; on the CPU, ``results``."""
        for kept in self._waiting:
            if kept.flight is not None:
                kept.flight.done.synchronize()
        self._look()
        return self.results

    def text(self) -> str:
        """Return the results as text, with what was not located."""
        count = f"{self.skips} skipped steps, {self.replays} run again (limit {self.limit})"
        missed = f", {self.missed} steps not watched" if self.missed else ""
        return "\n".join([f"locator: {count}{missed}", *(found.text() for found in self.results)])

    def __str__(self) -> str:
        """Return the results as text."""
        return self.text()

    def detach(self) -> None:
        """Stop watching, and drop what is kept; the results stay."""
        for stop in self._detach:
            stop()
        self._detach, self._calls, self._batch = [], [], ()
        self._waiting.clear()


def _place(found: Located) -> tuple[str, ...]:
    return found.direction, found.module, found.line, found.operation, found.given, found.kind

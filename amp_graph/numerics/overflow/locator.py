"""``Locator``: watches a training, and locates what made the gradients of a skipped step infinite.

Before: ``skipped_steps`` grows, and nobody knows why. After: ``locator.results``, and causes in ``scale_history``.

Nothing is checked that the step does not check anyway: its verdict, the count of skipped steps, is read after it, for
which the host waits on CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.errors import CaptureError, warn
from amp_graph.lists.errors import Attempt, first_line
from amp_graph.model_state import RandomState
from amp_graph.numerics.overflow.locate import located, task_of
from amp_graph.numerics.overflow.result import Located
from amp_graph.numerics.overflow.run import Task
from amp_graph.numerics.overflow.scale_history import loss_scale_of_source
from amp_graph.scaling.grad_scaler import GradScaler
from amp_graph.step.train_step import TrainStep

LIMIT = 3
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

    The batch of the running step is kept alive. Buffers, such as running means, are as the step left them. On CUDA the
    host waits for the end of each step.

    Raises CaptureError for what has no loss scale: without one, a step with infinite gradients is not skipped.
    ``loss_scale=1.0`` checks and skips without scaling.
    """

    def __init__(self, target: Any, scaler: GradScaler | None = None, *, limit: int = LIMIT) -> None:
        """Start to watch."""
        if type(limit) is not int or limit < 1:
            raise CaptureError(f"Locator: limit={limit!r}\n  legal: a whole number, 1 or more\n  fix:   limit={LIMIT}")
        self.limit, self.results, self.skips, self.replays = limit, list[Located](), 0, 0
        self._calls = deque[Call](maxlen=CALLS)
        self._random: Any = None
        self._batch: tuple[Any, ...] = ()
        self._detach: list[Callable[[], None]] = []
        if isinstance(target, TrainStep):
            self._scale = loss_scale_of_source(target, "Locator")
            self._detach.append(target.watch(self))
        elif isinstance(target, torch.nn.Module) and isinstance(scaler, GradScaler):
            self._scale = loss_scale_of_source(scaler, "Locator")
            self._watch_loop(target, scaler)
        else:
            raise CaptureError(
                f"Locator: a {type(target).__name__} {'without' if scaler is None else 'with'} a GradScaler of ours\n"
                "  legal: a TrainStep; a converted model and its amp_graph.GradScaler\n"
                "  fix:   amp_graph.Locator(model, scaler)"
            )
        self._target = target

    # -- a TrainStep ------------------------------------------------------------------------------------

    def before(self, batch: Sequence[Any]) -> None:
        """A step of ``batch`` begins."""
        self._batch, self._random = tuple(batch), RandomState()

    def after(self) -> None:
        """That step is over."""
        step, batch, random = self._target, self._batch, self._random
        self._batch = ()

        def tasks(scale: float) -> list[Task]:
            return [replace(task_of(step, batch, None, None, scale), random=random)]

        self._ended(tasks)

    # -- a loop of the user's ----------------------------------------------------------------------------

    def _watch_loop(self, model: torch.nn.Module, scaler: GradScaler) -> None:
        first = model.register_forward_pre_hook(self._called, with_kwargs=True)
        last = model.register_forward_hook(self._returned, with_kwargs=True)
        scaler.watch(self._updated)
        self._detach += [first.remove, last.remove, lambda: scaler.watch(None)]

    def _called(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._calls.append(Call(args, kwargs, RandomState()))

    def _returned(self, model: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._calls and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._calls[-1].watch(result)

    def _updated(self) -> None:
        model, calls = self._target, [call for call in self._calls if call.take_gradients()]
        self._calls.clear()
        if not calls:
            return

        def tasks(scale: float) -> list[Task]:
            own = task_of(model, (torch.zeros(()),), None, None, scale)
            how = [(((call.args, call.kwargs),), call) for call in calls]
            return [replace(own, parts=(p,), random=c.random, outputs_gradients=c.gradients) for p, c in how]

        self._ended(tasks)

    # -- verdicts -------------------------------------------------------------------------------------------

    def _ended(self, tasks: Callable[[float], list[Task]]) -> None:
        """A step is over: if it was skipped, locate why; ``tasks``: what to run again, given its scale."""
        scale, before = self._scale.records.last()
        if int(self._scale.state[3]) > int(before):
            self.skips += 1
            self._scale.records.explain(self._scale.records.count, self._run_again(tasks, float(scale)))

    def _run_again(self, tasks: Callable[[float], list[Task]], scale: float) -> str:
        """Run the step again, and keep what is found; return the cause in words."""
        if self.replays >= self.limit:
            return f"not located: {self.limit} skipped steps were"
        self.replays += 1
        number = self._scale.records.count
        with Attempt() as tried:  # the training goes on
            found = next((one for task in tasks(scale) if (one := located(task, try_fix=True))), None)
        if tried.error is not None:
            told = first_line(tried.error)
            warn(f"amp_graph: Locator: step {number} was skipped and could not be run again: {told}")
            return f"not located: {tried.reason}"
        if found is None:
            return f"not located: all was finite when it was run again, of a loop its last {CALLS} calls of the model"
        if all(_place(found) != _place(known) for known in self.results):
            self.results.append(found)
            if not found.is_ordinary:
                warn(f"amp_graph: step {number} was skipped: {found.text().rstrip()}")
        return found.cause

    # -- reading ------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the results as text, with what was not located."""
        count = f"{self.skips} skipped steps, {self.replays} run again (limit {self.limit})"
        return "\n".join([f"locator: {count}", *(found.text() for found in self.results)])

    def __str__(self) -> str:
        """Return the results as text."""
        return self.text()

    def detach(self) -> None:
        """Stop watching, and drop what is kept; the results stay."""
        for stop in self._detach:
            stop()
        self._detach, self._batch = [], ()
        self._calls.clear()


def _place(found: Located) -> tuple[str, ...]:
    return found.direction, found.module, found.line, found.operation, found.given, found.kind


class Call:
    """One call of a model: its arguments, random state, and the gradients that its outputs get."""

    def __init__(self, args: Any, kwargs: Any, random: Any) -> None:
        self.args, self.kwargs, self.random = args, kwargs, random
        self.gradients: list[Tensor | None] = []
        self._outs: list[Tensor] = []

    def watch(self, result: Any) -> None:
        """Have autograd keep the gradients of ``result``; a hook of Python's would cost more."""
        self._outs = [result] if type(result) is Tensor else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for out in self._outs:
            if out.requires_grad and not out.is_leaf:
                out.retain_grad()

    def take_gradients(self) -> bool:
        """Read the gradients and let go of the outputs; return whether there are any."""
        self.gradients = [out.grad if out.requires_grad and not out.is_leaf else None for out in self._outs]
        self._outs = []
        return any(grad is not None for grad in self.gradients)

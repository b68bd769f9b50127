"""Chooses how a ``TrainStep`` runs a batch: a whole traced step, a forward with symbolic sizes, or uncaptured.

Before: batches of thirty lengths, and a traced step for each. After: the first two are traced, a forward with symbolic
sizes serves all others, and batches without a graph run as code that escapes capture.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_graph.capture.as_written import Region, in_words, widened
from amp_graph.capture.capture_log import MIXED
from amp_graph.capture.recapture_limits import Backoff, NoGraph, Variants
from amp_graph.capture.recapture_reasons import call_site
from amp_graph.errors import warn
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner, capture_with_dynamo, dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find, own_code_object, weakly
from amp_graph.passes.torch_compat.dynamo_settings import NO_LIMIT
from amp_graph.step.recapture_warning import Recaptures
from amp_graph.step.step_arguments import (
    call_model,
    forward_of,
    loss_of,
    refuse_gradients_beyond,
    refuse_what_is_no_loss,
)
from amp_graph.step.step_cache import CapturedSteps
from amp_graph.step.step_graph import mark_loss

OWN = "amp_graph_step"  # the name of the function that is captured
TRACED = 2  # whole traced steps; further sizes and numbers get forwards with symbols


@dataclass(eq=False)
class StepRuns:
    """Runs batches through ``model``, with its loss, and into ``steps``.

    learns: whether other steps may take the place of traced ones. Not over several ranks, whose gradients are to
    travel in the same order.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any] | None
    outputs: bool
    steps: CapturedSteps
    region: Region | None  # of autocast, in which steps without a graph run
    max_graphs: int
    learns: bool
    collector_waits: bool
    notes: list[str] = field(default_factory=list)  # for the report

    def __post_init__(self) -> None:
        """Start with no captures."""
        self._recaptures = Recaptures()
        self.capture()

    def capture(self) -> None:
        """Drop all captures; the next call captures."""
        loss_fn, outputs, model = self.loss_fn, self.outputs, forward_of(self.model)

        def amp_graph_step(*batch: Any) -> Any:
            out = call_model(model, batch[0]) if loss_fn is not None else call_model(model, *batch)
            loss = loss_fn(out, *batch[1:]) if loss_fn is not None else loss_of(out)
            return (mark_loss(loss), out) if outputs else mark_loss(loss)

        function: Any = own_code_object(amp_graph_step)  # type: ignore[arg-type]
        # The same name as before, by which Dynamo knows which sizes have changed since the first capture.
        again = types.FunctionType(function.__code__.replace(), function.__globals__, OWN, None, function.__closure__)
        self.find: Find = CompiledFrames(function, has_backward=False).find
        self._find_plain: Find = CompiledFrames(again).find
        self.free = {"loss_fn": loss_fn, "outputs": outputs, "model": model}  # the function's closure
        self._forward, self._backoff = amp_graph_step, Backoff()
        budget, traced = self.steps.budget, min(TRACED, self.max_graphs) if self.learns else NO_LIMIT
        named = call_site(self.model.forward)
        self._traced = Variants(OWN, traced, False, budget, of=named)
        self._plain = Variants(OWN, max(self.max_graphs - traced, 0), True, budget, static=0, of=named)
        self.run = self._captured_by(function, self.steps.take, self._traced, dynamic=False)
        self._run_plain = self._captured_by(again, self.steps.take_plain, self._plain, dynamic=None)

    def _captured_by(
        self, function: Any, backend: Callable[..., Runner], variants: Variants, dynamic: bool | None
    ) -> Runner:
        return capture_with_dynamo(
            function,
            weakly(backend),
            dynamic=dynamic,
            fullgraph=True,
            heard=CaptureListener(),  # fullgraph: a graph break raises, so there are no events
            collector_waits=self.collector_waits,
            choice=variants,
        )

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Run one step: traced whole, else its forward captured with symbolic sizes, else uncaptured."""
        if self._backoff.passes(self.model.training):
            return self._as_written(batch)
        known, local = len(self.steps.captured), {"batch": tuple(batch), **self.free}
        found = self.find(local) or (self._find_plain(local) if self._traced.is_full else None)
        for run in (found,) if found else (self.run, self._run_plain):
            try:
                result = run(*batch)
            except NoGraph as stopped:
                if stopped.owner not in (self._traced, self._plain):
                    raise
                continue
            except dynamo_errors.TorchRuntimeError as error:
                if not (self.region and MIXED.search(str(error))):
                    raise
                self._say(f"an operation has operands of two dtypes: such steps run {self.how}, uncaptured")
                break
            if len(self.steps.captured) > known and not self.learns:
                self._recaptures.note(batch)
            self._backoff.hit(self.model.training)
            return result
        self._backoff.missed(self.model.training)
        self._say_what_varies()
        return self._as_written(batch)

    def _as_written(self, batch: Sequence[Any]) -> Any:
        """Run a step with an uncaptured forward: under autocast, or in fp32 by policies that it does not know."""
        refuse_gradients_beyond(tree_leaves(list(batch)))

        def compute() -> tuple[Any, ...]:
            with torch.autocast(*self.region) if self.region else nullcontext():
                found = self._forward(*batch)
            refuse_what_is_no_loss(found[0] if self.outputs else found)
            return tree_map_only(torch.Tensor, widened, found if self.outputs else (found,))

        found = self.steps.run_as_written(compute)
        return tuple(found) if self.outputs else found[0]

    @property
    def how(self) -> str:
        """How steps without a graph run, in words."""
        return in_words(self.region)

    def _say_what_varies(self) -> None:
        """Report once which value differs between steps, so that captures stopped."""
        why = self._plain.why or self._traced.why
        if why is not None:
            self._say(
                f"captured {len(self.steps.captured)} times, and steps still differ: steps without a graph run "
                f"{self.how} from now on; they differ in {why}\n"
                f"  fix:   {why.fix}; max_graphs={self.max_graphs} limits the graphs that are kept"
            )

    def _say(self, told: str) -> None:
        if not self.notes:
            self.notes.append(told)
            warn(f"amp_graph: TrainStep of {type(self.model).__name__}: {told}")

"""Chooses how a ``TrainStep`` runs a batch: a whole traced step, a forward with symbolic sizes, or as written.

Before: batches of thirty lengths, and a traced step for each. After: the first two are traced, a forward with symbolic
sizes serves all others. Batches without a graph run as the user wrote them, under the policy's autocast, and in fp32
where that fails. Over several ranks all are traced, and a warning names what has them captured again and again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from amp_graph.capture.as_written import AsWritten
from amp_graph.capture.diagnostics import Diagnostics
from amp_graph.capture.recapture_limits import FIX, NoGraph, Variants
from amp_graph.errors import AmpGraphError, CaptureError, warn
from amp_graph.lists.errors import Undo
from amp_graph.model_state import ModelState
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, Runner, capture_with_dynamo, dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find, own_code_object, weakly
from amp_graph.passes.torch_compat.dynamo_settings import NO_LIMIT
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA
from amp_graph.policy import Policy
from amp_graph.step.step_arguments import (
    call_model,
    forward_of,
    loss_of,
    refuse_gradients_beyond,
    refuse_what_is_no_loss,
    set_up_outside,
)
from amp_graph.step.step_cache import CapturedSteps
from amp_graph.step.step_graph import NoSize, mark_loss

OWN = "amp_graph_step"  # the name of the function that is captured
TRACED = 2  # whole traced steps; further sizes and numbers get forwards with symbols
NOT_CAPTURED = (dynamo_errors.TorchDynamoException, *DEPENDS_ON_DATA, NoSize)


@dataclass(eq=False)
class StepRuns:
    """Runs batches through ``model``, with its loss, and into ``steps``.

    learns: whether other steps may take the place of traced ones. Not over several ranks, whose gradients are to
    travel in the same order: what is not one graph is refused there.
    """

    model: torch.nn.Module
    loss_fn: Callable[..., Any] | None
    outputs: bool
    steps: CapturedSteps
    policy: Policy
    max_graphs: int
    learns: bool
    collector_waits: bool

    def __post_init__(self) -> None:
        """Start with no captures."""
        self._recaptures = Recaptures()
        self.diagnostics = Diagnostics(self.model, strict=False)
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
        policy = replace(self.policy, keep_outputs=True)
        self._plain_forward = AsWritten(self.model, amp_graph_step, policy, self.diagnostics)
        self._failed: set[bool] = set()  # the modes, train or eval, in which a capture has failed
        traced = min(TRACED, self.max_graphs) if self.learns else NO_LIMIT
        self._traced = Variants(OWN, traced, False)
        self._plain = Variants(OWN, max(self.max_graphs - traced, 0), True, static=0)
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
        """Run one step: traced whole, else its forward captured with symbolic sizes, else as written."""
        mode = self.model.training
        known, local = len(self.steps.captured), {"batch": tuple(batch), **self.free}
        no_more = mode in self._failed
        found = self.find(local) or (self._find_plain(local) if no_more or self._traced.is_full else None)
        failed: Exception | None = None
        for run in (found,) if found else () if no_more else (self.run, self._run_plain):
            try:
                result = run(*batch)
            except NoGraph as stopped:
                if stopped.owner not in (self._traced, self._plain):
                    raise
                continue
            except NOT_CAPTURED as error:
                failed = error
                break
            if len(self.steps.captured) > known and not self.learns:
                self._recaptures.note(batch)
            return result
        if failed is not None:  # outside of the handler, so that the user's errors are not chained to Dynamo's
            return self._after_failed_capture(failed, batch)
        self._say_what_varies()
        return self._as_written(batch)

    def _after_failed_capture(self, failed: Exception, batch: Sequence[Any]) -> Any:
        """Run a step as written, which raises the user's own errors; the model is then as it was before."""
        inner = getattr(failed, "inner_exception", None)
        if isinstance(inner, AmpGraphError):
            raise inner from None
        if set_up_outside(self.model, failed):
            return self(batch)
        before = ModelState(self.model, list(batch))
        if not self.learns:
            self._refuse_with_ranks(failed, before, batch)
        with Undo(before.restore):
            result = self._as_written(batch)
        self._failed.add(self.model.training)
        told = f"{type(self.model).__name__} and its loss are not one graph: steps like this one run {self.how}"
        fix = "change that line, or amp_graph.convert(model) with amp_graph.GradScaler, which has graphs between breaks"
        self.diagnostics.warn(f"TrainStep: {told}", str(failed).strip(), fix=fix)
        return result

    def _refuse_with_ranks(self, failed: Exception, before: ModelState, batch: Sequence[Any]) -> None:
        """Raise the user's own error, if there is one, else CaptureError."""
        try:
            self._plain_forward.forward(*batch)
        finally:
            before.restore()
        raise CaptureError(
            f"TrainStep: {type(self.model).__name__} and its loss are not one graph, as they must be with several "
            f"ranks: {str(failed).strip()}\n"
            "  fix:   change that line, or use amp_graph.convert(model) with amp_graph.GradScaler"
        ) from failed

    def _as_written(self, batch: Sequence[Any]) -> Any:
        """Run a step with an uncaptured forward: under autocast, or in fp32 by policies that it does not know."""
        refuse_gradients_beyond(tree_leaves(list(batch)))

        def compute() -> tuple[Any, ...]:
            found = self._plain_forward.run(tuple(batch), {})
            refuse_what_is_no_loss(found[0] if self.outputs else found)
            return found if self.outputs else (found,)

        found = self.steps.run_as_written(compute)
        return tuple(found) if self.outputs else found[0]

    @property
    def how(self) -> str:
        """How steps without a graph run, in words."""
        return self._plain_forward.how

    def _say_what_varies(self) -> None:
        """Report once which value differs between steps, so that captures stopped."""
        why = self._plain.why or self._traced.why
        if why and not any(note.startswith("captured ") for note in self.diagnostics.notes):
            self.diagnostics.warn(
                f"captured {len(self.steps.captured)} times, and steps still differ: steps without a graph run "
                f"{self.how} from now on; they differ in {why}",
                fix=f"{FIX}; max_graphs={self.max_graphs} limits the graphs that are kept",
            )


WARNED_AT = 16  # captures: variants of a batch, train and eval take some


class Recaptures:
    """The values, or shapes of tensors, in the batch at each capture of a step."""

    def __init__(self) -> None:
        """Start with no captures."""
        self.given: dict[str, set[Any]] = {}
        self.count = 0

    def note(self, batch: Sequence[Any]) -> None:
        """Record the batch of another capture; warn once if there were many."""
        for path, value in tree_flatten_with_path(tuple(batch))[0]:
            seen = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)[:200]
            self.given.setdefault(f"batch{keystr(path)}", set()).add(seen)
        self.count += 1
        if self.count == WARNED_AT:
            warn(self._told())

    def _told(self) -> str:
        place, seen = max(self.given.items(), key=lambda item: len(item[1]), default=("batch", set()))
        text = f"TrainStep: captured {self.count} times; each takes as long as the first, and all graphs are kept"
        if len(seen) < WARNED_AT // 2:
            return f"{text}\n  fix:   look for what changes from step to step: TORCH_LOGS=recompiles"
        if all(isinstance(one, tuple) for one in seen):
            return f"{text}: {place} came in {len(seen)} shapes\n  fix:   pad it to a few sizes"
        return (
            f"{text}: {place} had {len(seen)} values\n  fix:   torch.tensor(value), which may change without a capture"
        )

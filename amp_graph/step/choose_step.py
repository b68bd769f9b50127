"""Chooses how a ``TrainStep`` runs a batch: a whole traced step, or the forward that ``convert`` runs, and autograd.

Before: batches of thirty lengths, and a traced step for each. After: the first two kinds are traced; for all others,
and for what is not one graph, the model runs as ``amp_graph.convert`` runs it. Over several ranks all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import TRIED_AGAIN, Conversion, conversion_of
from amp_graph.capture.diagnostics import Diagnostics, break_at
from amp_graph.capture.dynamo_backend import Captured
from amp_graph.capture.recapture_limits import NoGraph, Variants
from amp_graph.errors import AmpGraphError, CaptureError, warn
from amp_graph.lists.errors import Undo, first_line
from amp_graph.model_state import ModelState
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, capture_with_dynamo, dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find, own_code_object, weakly
from amp_graph.passes.torch_compat.dynamo_settings import NO_LIMIT
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA
from amp_graph.step.step_arguments import (
    call_model,
    forward_of,
    loss_of,
    refuse_gradients_beyond,
    refuse_what_is_no_loss,
)
from amp_graph.step.step_cache import CapturedSteps
from amp_graph.step.step_graph import NoSize, mark_loss
from amp_graph.step.trace_step import StepBuilder

OWN = "amp_graph_step"  # the name of the function that is captured
TRACED = 2  # whole traced steps; further sizes and numbers get the graphs of ``convert``
WARNED_AT = 16  # captures over several ranks: variants of a batch, train and eval take some
NOT_CAPTURED = (dynamo_errors.TorchDynamoException, *DEPENDS_ON_DATA, NoSize)


@dataclass(eq=False)
class StepRuns:
    """Runs batches through the model of ``builder``, with its loss, and into ``steps``.

    The model's own calls may take the place of traced steps, but not over several ranks, whose gradients are to travel
    in the same order: what is not one graph is refused there.
    """

    builder: StepBuilder
    loss_fn: Callable[..., Any] | None
    outputs: bool
    steps: CapturedSteps
    max_graphs: int

    def __post_init__(self) -> None:
        """Start with no captures."""
        self.model, self.policy, self.alone = self.builder.model, self.builder.policy, self.builder.ranks is None
        self._diagnostics = Diagnostics(self.model, strict=False)
        self.capture()

    def capture(self) -> None:
        """Drop all captures; the next call captures."""
        self._uncaptured = _with_loss(self.model, self.loss_fn, self.outputs)
        forward = forward_of(self.model)
        function: Any = own_code_object(_with_loss(forward, self.loss_fn, self.outputs))  # type: ignore[arg-type]
        self.find: Find = CompiledFrames(function, has_backward=False).find
        self.free = {"loss_fn": self.loss_fn, "outputs": self.outputs, "model": forward}  # the function's closure
        self._failed: dict[bool, int] = {}  # calls since a capture failed, by mode: train or eval
        most = min(TRACED, self.max_graphs) if self.alone else NO_LIMIT
        self._variants = Variants(OWN, most, False)
        self._conversion: Conversion | None = None
        self.run = capture_with_dynamo(
            function,
            weakly(self.steps.take),
            dynamic=False,
            fullgraph=True,
            heard=CaptureListener(),  # fullgraph: a graph break raises, so there are no events
            collector_waits=self.builder.compile == "eager",
            choice=self._variants,
        )

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Run one step: traced whole, or through the model as it is converted."""
        mode, known = self.model.training, len(self.steps.captured)
        found = self.find({"batch": tuple(batch), **self.free})
        if found is None and (self._stays_untraced(mode) or self._variants.is_full):
            return self._converted(batch)
        failed: Exception | None = None
        try:
            result = (found or self.run)(*batch)
        except NoGraph as stopped:
            if stopped.owner is not self._variants:
                raise
        except NOT_CAPTURED as error:
            failed = error
        else:
            self._look_at_captures(known)
            return result
        if failed is None or mode in self._failed:  # outside of the handler: the user's errors have no other's context
            return self._converted(batch)
        return self._after_failed_capture(failed, batch)

    def _stays_untraced(self, mode: bool) -> bool:
        """Say whether a capture has failed in this mode; one more is tried, as a first call may set a model up."""
        if mode not in self._failed:
            return False
        self._failed[mode] += 1
        return self._failed[mode] != TRIED_AGAIN

    def _look_at_captures(self, known: int) -> None:
        count = len(self.steps.captured)
        if count > known and self.policy.keep_ops:
            self._diagnostics.unkept(one.rewritten for one in self.steps.captured)
        if count > known and count == WARNED_AT:
            warn(
                f"TrainStep: captured {count} times; each takes as long as the first, and all graphs are kept\n"
                "  fix:   pad batches to a few sizes; TORCH_LOGS=recompiles says what changes from step to step"
            )

    def _after_failed_capture(self, failed: Exception, batch: Sequence[Any]) -> Any:
        """Run a step that is not traced, which raises the user's own errors; the model is then as it was before."""
        inner = getattr(failed, "inner_exception", None)
        if isinstance(inner, AmpGraphError):
            raise inner from None
        if self.builder.sharded.units:  # a rank that runs the model alone would wait for gathers of the others
            self._refuse_batch(failed, batch)
            self._refuse_several_graphs(failed)
        before = ModelState(self.model, list(batch))
        if not self.alone:
            try:
                self._uncaptured(*batch)  # which raises the user's own error, if there is one
            finally:
                before.restore()
            self._refuse_several_graphs(failed)
        with Undo(before.restore):
            result = self._converted(batch)
        self._failed[self.model.training] = 1
        name = type(self.model).__name__
        self._diagnostics.warn(
            f"TrainStep: {name} and its loss are not one graph: the model runs as amp_graph.convert(model) runs it",
            _cause_of(failed),
            fix="change that line, or amp_graph.convert(model) with amp_graph.GradScaler",
        )
        return result

    def _refuse_batch(self, failed: Exception, batch: Sequence[Any]) -> None:
        """Raise CaptureError with what an operation says of the batch, if one has failed in the capture."""
        own: BaseException = failed
        while isinstance(own, dynamo_errors.TorchDynamoException) and (inner := own.__cause__ or own.__context__):
            own = inner
        if own is failed or not isinstance(failed, dynamo_errors.TorchRuntimeError):
            return
        place = break_at("", getattr(failed, "real_stack", None)).where
        given = ", ".join(type_text(one) for one in tree_leaves(list(batch)) if isinstance(one, Tensor))
        raise CaptureError(
            f"TrainStep: {type(self.model).__name__} or its loss fails for this batch{f': {place}' * bool(place)}: "
            f"{type(own).__name__}: {first_line(own)}\n"
            f"  legal: shapes and dtypes that they take; the batch has {given or 'no tensors'}\n"
            "  fix:   that batch, or that line"
        ) from own

    def _refuse_several_graphs(self, failed: Exception) -> NoReturn:
        raise CaptureError(
            f"TrainStep: {type(self.model).__name__} and its loss are not one graph, as they must be with several "
            f"ranks: {_cause_of(failed)}\n"
            "  fix:   change that line, or use amp_graph.convert(model) with amp_graph.GradScaler"
        ) from failed

    def _converted(self, batch: Sequence[Any]) -> Any:
        """Run a step whose model runs as it is converted, and whose gradients are autograd's."""
        refuse_gradients_beyond(tree_leaves(list(batch)))

        def compute() -> tuple[Any, ...]:
            with self._as_converted():
                found = self._uncaptured(*batch)
            refuse_what_is_no_loss(found[0] if self.outputs else found)
            return tuple(found) if self.outputs else (found,)

        found = self.steps.run_untraced(compute)
        return tuple(found) if self.outputs else found[0]

    @contextmanager
    def _as_converted(self) -> Iterator[None]:
        """Let calls of the model run its conversion; it stays unconverted otherwise."""
        held = self.model.__dict__.get("forward")
        if conversion_of(self.model) is None:
            if self._conversion is None:
                policy, most = replace(self.policy, keep_outputs=True), beside_traced(self.max_graphs)
                self._conversion = Conversion(self.model, policy, wrapped=held, max_graphs=most)
                self._conversion.captured.start()
            self.model.__dict__["forward"] = self._conversion
        try:
            yield
        finally:
            self.model.__dict__.pop("forward", None)
            if held is not None:
                self.model.__dict__["forward"] = held

    # -- what the report reads ------------------------------------------------------------------------

    @property
    def graphs(self) -> list[Captured]:
        """The graphs of steps, then those of the model's own calls."""
        mine = [Captured(one.rewritten, self.model.training, grad=True) for one in self.steps.captured]
        found = conversion_of(self.model) or self._conversion
        return mine if found is None else [*mine, *found.graphs]

    @property
    def notes(self) -> list[str]:
        """What was said of steps that are not traced."""
        found = conversion_of(self.model) or self._conversion
        return [*self._diagnostics.notes, *(() if found is None else found.diagnostics.notes)]


def beside_traced(max_graphs: int) -> int:
    """Return how many graphs a model's own calls may have, beside the whole steps."""
    return max(max_graphs - TRACED, 1)


def _cause_of(failed: Exception) -> str:
    """Return why a capture failed, in a line that begins with the user's; Dynamo's text where it knows none."""
    place = break_at(str(failed), getattr(failed, "real_stack", None))
    return f"{place.where}: {place.reason}" if place.where else str(failed).strip()


def _with_loss(model: Any, loss_fn: Callable[..., Any] | None, outputs: bool) -> Callable[..., Any]:
    """Return the function of a batch that returns the loss, and with ``outputs`` those as well."""

    def amp_graph_step(*batch: Any) -> Any:
        out = call_model(model, batch[0]) if loss_fn is not None else call_model(model, *batch)
        loss = loss_fn(out, *batch[1:]) if loss_fn is not None else loss_of(out)
        return (mark_loss(loss), out) if outputs else mark_loss(loss)

    return amp_graph_step

"""Captures the model of a ``TrainStep`` with its loss, for each kind of batch, and refuses what is not one graph.

Before: ``step(x, y)`` for another shape. After: one more whole-step graph, or a ``CaptureError`` with the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.diagnostics import Diagnostics, break_at
from amp_graph.capture.dynamo_backend import Captured
from amp_graph.errors import AmpGraphError, CaptureError, warn
from amp_graph.lists.errors import first_line
from amp_graph.model_state import unchanged
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.torch_compat.dynamo_capture import CaptureListener, capture_with_dynamo, dynamo_errors
from amp_graph.passes.torch_compat.dynamo_entries import CompiledFrames, Find, own_code_object, weakly
from amp_graph.passes.torch_compat.fake import DEPENDS_ON_DATA
from amp_graph.step.step_arguments import call_model, forward_of, loss_of
from amp_graph.step.step_cache import CapturedSteps
from amp_graph.step.step_graph import NoSize, mark_loss
from amp_graph.step.trace_step import StepBuilder

OWN = "amp_graph_step"  # the name of the function that is captured
WARNED_AT = 16  # captures: variants of a batch, train and eval take some
NOT_CAPTURED = (dynamo_errors.TorchDynamoException, *DEPENDS_ON_DATA, NoSize)


@dataclass(eq=False)
class StepRuns:
    """Runs batches through the model of ``builder``, with its loss, and into ``steps``."""

    builder: StepBuilder
    loss_fn: Callable[..., Any] | None
    outputs: bool
    steps: CapturedSteps

    def __post_init__(self) -> None:
        """Start with no captures."""
        self.model, self.policy = self.builder.model, self.builder.policy
        self._diagnostics = Diagnostics(self.model, strict=False)
        self.capture()

    def capture(self) -> None:
        """Drop all captures; the next call captures."""
        self._uncaptured = _with_loss(self.model, self.loss_fn, self.outputs)
        forward = forward_of(self.model)
        function: Any = own_code_object(_with_loss(forward, self.loss_fn, self.outputs))  # type: ignore[arg-type]
        self.find: Find = CompiledFrames(function, has_backward=False).find
        self.free = {"loss_fn": self.loss_fn, "outputs": self.outputs, "model": forward}  # the function's closure
        self.run = capture_with_dynamo(
            function,
            weakly(self.steps.take),
            dynamic=False,
            fullgraph=True,
            heard=CaptureListener(),  # fullgraph: a graph break raises, so there are no events
            collector_waits=self.builder.compile == "eager",
        )

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Run one step, which is traced as a whole."""
        known = len(self.steps.captured)
        failed: Exception | None = None
        try:
            result = (self.find({"batch": tuple(batch), **self.free}) or self.run)(*batch)
        except NOT_CAPTURED as error:
            failed = error
        if failed is not None:  # outside of the handler: the user's errors have no other's context
            self._refuse(failed, batch)
        self._look_at_captures(known)
        return result

    def _look_at_captures(self, known: int) -> None:
        count = len(self.steps.captured)
        if count > known and self.policy.keep_ops:
            self._diagnostics.unkept(one.rewritten for one in self.steps.captured)
        if count > known and count == WARNED_AT:
            warn(
                f"TrainStep: captured {count} times; each takes as long as the first, and all graphs are kept\n"
                "  fix:   pad batches to a few sizes; TORCH_LOGS=recompiles says what changes from step to step"
            )

    def _refuse(self, failed: Exception, batch: Sequence[Any]) -> NoReturn:
        """Raise the user's own error, or CaptureError with the line that is in no graph; nothing has changed then."""
        inner = getattr(failed, "inner_exception", None)
        if isinstance(inner, AmpGraphError):
            raise inner from None
        if self.builder.sharded.units:  # a rank that runs the model alone would wait for gathers of the others
            self._refuse_batch(failed, batch)
        else:
            with unchanged(self.model, list(batch)):
                self._uncaptured(*batch)
        raise CaptureError(
            f"TrainStep: {type(self.model).__name__} and its loss are not one graph: {_cause_of(failed)}\n"
            "  legal: a forward and a loss that Dynamo captures without a graph break; what a first call sets up is "
            "there if the model was called before\n"
            "  fix:   change that line, or train by amp_graph.convert(model) with amp_graph.GradScaler"
        ) from failed

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

    # -- what the report reads ------------------------------------------------------------------------

    @property
    def graphs(self) -> list[Captured]:
        """The graphs of steps, then those of the model's own calls."""
        mine = [Captured(one.rewritten, self.model.training, grad=True) for one in self.steps.captured]
        found = conversion_of(self.model)
        return mine if found is None else [*mine, *found.graphs]

    @property
    def notes(self) -> list[str]:
        """What was said of captures."""
        found = conversion_of(self.model)
        return [*self._diagnostics.notes, *(() if found is None else found.diagnostics.notes)]


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

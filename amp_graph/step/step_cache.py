"""The captures of one ``TrainStep``: selects the traced step for the current parameters, and runs it.

Before: the graph that Dynamo captured of ``loss_fn(model(x), y)``, called with its parameters and batch. After:
the whole-step graph, traced for these parameters, runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from amp_graph.graph_log import warn_of_full_precision
from amp_graph.optim.optimizer_guards import show_update
from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.passes.torch_compat.dynamo_entries import weakly
from amp_graph.scaling.loss_scale import STUCK, FloorWatch, complain_of_floor
from amp_graph.step.step_graph import StepGraph
from amp_graph.step.trace_step import StepBuilder
from amp_graph.step.traced_step import CapturedStep, takes_symbols
from amp_graph.step.untraced_step import PlainStep


class CapturedSteps:
    """All captures and traces so far; ``last``: whether the next call is the last micro-batch of a step."""

    def __init__(self, builder: StepBuilder, at_floor: str) -> None:
        """Start with none; at_floor: "warn" or "error"."""
        self.captured: list[CapturedStep] = []
        self.last = True
        self._builder, self._state, self._watched = builder, builder.state, builder.watched
        self._at_floor, self._calls, self._floor = at_floor, 0, FloorWatch()
        self._written: tuple[tuple[int, ...], CapturedStep] | None = None  # uncaptured steps, by their parameters

    def _all(self) -> list[CapturedStep]:
        return [*self.captured, *(() if self._written is None else self._written[1:])]

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Take a captured forward with its loss, as Dynamo's backend; the result references this object weakly."""
        if takes_symbols(gm):  # from ``mark_dynamic``; a traced step is for one size
            return self.take_plain(gm, example_inputs)
        return self._recorded(self._builder.take(gm))

    def take_plain(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Take a forward with symbolic sizes, whose steps are not traced."""
        return self._recorded(self._builder.take_plain(gm, example_inputs))

    def run_as_written(self, compute: Callable[[], tuple[Any, ...]]) -> Any:
        """Run a step with an uncaptured forward: ``compute`` returns the loss and the step's other results."""
        weights = [p for group in self._watched.optimizer.param_groups for p in group["params"] if p.requires_grad]
        key = tuple(map(id, weights))
        if self._written is None or self._written[0] != key:
            names = {id(p): name for name, p in self._builder.model.named_parameters()}
            own = [names.get(id(p), f"parameter {n}") for n, p in enumerate(weights)]
            self._written = key, CapturedStep(None, 0, own, traced=False)
        written = self._written[1]
        written.forward = lambda *args: compute()
        try:
            return self._run(written, weights)
        finally:
            written.forward = None  # it references the batch

    def _recorded(self, captured: CapturedStep) -> Runner:
        self.captured.append(captured)
        owner, own = weakref.ref(self), weakref.ref(captured)

        def run(*args: Any) -> Any:
            steps, captured = owner(), own()
            assert steps is not None, "only the step calls its graphs"
            assert captured is not None, "a step keeps its graphs as long as it lives"
            return steps._run(captured, args)

        return run

    def forget(self) -> None:
        """Drop all traces; the next call traces again."""
        for bound in (bound for captured in self._all() for bound in captured.bounds):
            bound.steps.clear()

    def _run(self, captured: CapturedStep, args: Sequence[Any]) -> Any:
        """Run the step traced from ``captured`` for these parameters; trace it first if needed."""
        if captured.bind(args, self._watched.owned):
            self._drop_unreachable(captured)
        graph = captured.steps.get(captured.bound.kind(self.last, self._state.pending)) or self._trace(captured, args)
        if isinstance(graph, StepGraph):
            self._state.refresh(graph.copies)
        else:
            self._state.refresh(())  # masters are refreshed, too
        found = graph(*args)
        if self.last:
            self._was_updated(graph)
            self._look_at_floor(graph, args)
        else:
            self._state.were_added_up(graph.parameters(args))
        return found

    def _trace(self, captured: CapturedStep, args: Sequence[Any]) -> StepGraph | PlainStep:
        if not captured.traced:
            made = PlainStep(self._builder, captured, self.last, weakly(self._laid_out))
            captured.steps[captured.bound.kind(self.last, self._state.pending)] = made
            return made
        gm = captured.rewritten.gm
        if LEFT_ALONE in gm.meta and not any(other.steps for other in self.captured):
            warn_of_full_precision(type(self._builder.model).__name__, gm, captured.rewritten.dtype)
        traced = self._builder.build(captured, args, self.last)
        self._laid_out(traced.updates)
        captured.steps[captured.bound.kind(self.last, self._state.pending)] = traced
        return traced

    def _laid_out(self, updates: Sequence[GroupUpdate]) -> None:
        """Drop the steps whose states are no longer the optimizer's, after those of ``updates`` were created.

        These may be in another layout.
        """
        for bound in (bound for other in self._all() for bound in other.bounds):
            bound.steps = {kind: s for kind, s in bound.steps.items() if self._watched.has_state_of(s.updates)}
        self._watched.was_read_by(updates)

    def _drop_unreachable(self, captured: CapturedStep) -> None:
        """Drop the state of parameters that neither the model nor the optimizer has any more."""
        alive = self._watched.owned() | {id(p) for p in self._builder.model.parameters()}
        for other in self._all():
            other.bounds = [b for b in other.bounds if b.is_within(alive) or (other is captured and b is other.bound)]
        self._state.keep({id(p) for other in self._all() for b in other.bounds for p in b.parameters})

    def _was_updated(self, graph: StepGraph | PlainStep) -> None:
        """Let version counters show an update; it wrote this step's own copies."""
        self._state.pending.clear()
        show_update(self._watched.optimizer)
        if isinstance(graph, PlainStep):
            if not self._watched.why_outside:
                self._state.was_updated(())
            return
        if graph.after is None:
            beside = {id(p) for p in graph.absent.values()}
            self._state.was_updated([c for c in graph.copies if id(c.parameter) not in beside])

    def _look_at_floor(self, graph: StepGraph | PlainStep, args: Sequence[Any]) -> None:
        """Report gradients that stay infinite at the smallest scale."""
        self._calls += 1
        scale = self._builder.loss_scale
        if scale is None or self._calls % STUCK:
            return
        steps = self._floor.read(scale.state[4])
        if steps >= STUCK:
            complain_of_floor("TrainStep", steps, scale.floor, graph.first_bad(args), self._at_floor)

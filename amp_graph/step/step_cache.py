"""The captures of one ``TrainStep``: selects the traced step for the current parameters, runs it, and updates.

Before: the graph that Dynamo captured of ``loss_fn(model(x), y)``, called with its parameters and batch. After:
the whole-step graph, traced for these parameters, runs. Gradients that no such graph reads, of micro-batches and of
steps that are not traced, are read by a graph of the update alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.optim.optimizer_guards import show_update
from amp_graph.passes.graph.meta_keys import LEFT_ALONE
from amp_graph.passes.step.lay_out_gradients import laid_out
from amp_graph.passes.torch_compat.dynamo_capture import Runner
from amp_graph.rewrite import warn_of_full_precision
from amp_graph.scaling.loss_scale import FloorWatch
from amp_graph.step.step_graph import CapturedStep, NoSize, StepGraph, takes_symbols
from amp_graph.step.step_parts import differentiate, refuse_sparse
from amp_graph.step.step_state import Copy
from amp_graph.step.trace_step import StepBuilder

Key = tuple[tuple[Any, ...], ...]


class CapturedSteps:
    """All captures and traces so far."""

    def __init__(self, builder: StepBuilder, floor: FloorWatch) -> None:
        """Start with none."""
        self.captured: list[CapturedStep] = []
        self._builder, self._state, self._watched = builder, builder.state, builder.watched
        self._floor = floor
        self.updates: dict[Key, StepGraph] = {}  # graphs of an update alone

    def take(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Runner:
        """Take a captured forward with its loss, as Dynamo's backend; the result references this object weakly."""
        if takes_symbols(gm):
            raise NoSize("a size of the batch is marked as dynamic: a traced step is for one size")
        captured = self._builder.take(gm)
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
        for bound in (bound for captured in self.captured for bound in captured.bounds):
            bound.step = None
        self.updates.clear()

    def _run(self, captured: CapturedStep, args: Sequence[Any]) -> Any:
        """Run the step traced from ``captured`` for these parameters; trace it first if needed."""
        if captured.bind(args, self._watched.owned):
            self._drop_unreachable(captured)
        graph = captured.step
        if graph is None or not self._watched.has_state_of(graph.updates):
            graph = self._trace(captured, args)
        self._state.refresh(graph.copies)
        found = graph(*args)
        if graph.update:
            self._was_updated(graph.copies)
            return found
        if self._builder.micro_batches == 1:  # other ranks may have gradients that this one does not
            self.update_from_sums()
        return found

    def _trace(self, captured: CapturedStep, args: Sequence[Any]) -> StepGraph:
        gm = captured.rewritten.gm
        if LEFT_ALONE in gm.meta and not any(other.step for other in self.captured):
            warn_of_full_precision(type(self._builder.model).__name__, gm, captured.rewritten.dtype)
        if captured.refused:
            raise NoSize(captured.refused)
        try:
            traced = self._builder.build(captured, args)
        except NoSize as error:
            captured.refused = str(error)
            raise
        captured.bounds[0].step = traced
        return traced

    def _drop_unreachable(self, captured: CapturedStep) -> None:
        """Drop the state of parameters that neither the model nor the optimizer has any more."""
        alive = self._watched.owned() | {id(p) for p in self._builder.model.parameters()}
        for other in self.captured:
            in_use = other.bounds[: other is captured]
            other.bounds = [b for b in other.bounds if b in in_use or alive.issuperset(map(id, b.parameters))]
        self.updates = {key: graph for key, graph in self.updates.items() if alive.issuperset(one[0] for one in key)}
        self._state.keep(alive | {id(p) for other in self.captured for b in other.bounds for p in b.parameters})

    # -- gradients that no traced step reads ----------------------------------------------------------

    def run_untraced(self, compute: Callable[[], Sequence[Any]]) -> Any:
        """Run a step by autograd: ``compute`` returns the loss and the step's other results."""
        weights = [p for p in self._builder.parameters() if p.requires_grad]
        names, scale = self._builder.names_of(weights), self._builder.loss_scale
        if scale is not None and weights:
            scale.to(weights[0].device)
        with torch.enable_grad():
            factor, parts = None if scale is None else scale.scale, self._builder.micro_batches
            outputs, grads, _ = differentiate(compute(), 0, weights, factor, parts)
        found = [(name, p, g) for name, p, g in zip(names, weights, grads, strict=True) if g is not None]
        for name, _, grad in found:
            refuse_sparse(name, grad)
        with torch.no_grad():
            made = [laid_out(grad, self._state.target_of(p), ()) for _, p, grad in found]
            (self._state.add_up if parts > 1 else self._update)([p for _, p, _ in found], made)
        return tuple(outputs)

    def update_from_sums(self) -> None:
        """Update what the micro-batches of a step have summed gradients of, or any rank has."""
        read = {*self._state.pending, *map(id, self._builder.averaged())}
        parameters = [p for p in self._builder.parameters() if id(p) in read]
        absent = frozenset(n for n, p in enumerate(parameters) if id(p) not in self._state.pending)
        sums = [self._state.sum_of(p) for p in parameters]
        if self._watched.why_outside:  # the optimizer, and hooks of its step, may keep them
            sums = [total.clone() for total in sums]
        self._update(parameters, sums, absent)
        self._state.drop_sums()
        self._state.refresh(self._state.copies.values())  # which the next forward reads

    def _update(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor], absent: frozenset[int] = frozenset()
    ) -> None:
        """Update ``parameters`` by gradients of the scaled loss in fp32; ``absent``: those that are zeros instead."""
        if parameters:
            self._state.refresh(())  # masters
            key = _key(parameters, grads, absent)
            graph = self.updates.get(key)
            if graph is None or not self._watched.has_state_of(graph.updates):
                graph = self.updates[key] = self._builder.update_of(parameters, grads, absent)
            graph(*parameters, *grads, torch.zeros((), device=parameters[0].device))
        self._was_updated(())

    # -- after an update ------------------------------------------------------------------------------

    def _was_updated(self, copies: Iterable[Copy]) -> None:
        """Let version counters show an update, which wrote the step's own ``copies``."""
        show_update(self._watched.optimizer)
        if not self._watched.why_outside:
            self._state.was_updated(copies)
        if self._builder.loss_scale is not None:
            self._floor.look(self._builder.loss_scale, lambda: "amp_graph.locate(step, batch) names it")


def _key(parameters: Sequence[Tensor], grads: Sequence[Tensor], absent: frozenset[int]) -> Key:
    """Return what a graph of an update is for: parameters, where elements lie, gradients, which are absent."""
    pairs = enumerate(zip(parameters, grads, strict=True))
    return tuple((id(p), p.device, p.dtype, p.shape, p.stride(), g.stride(), n in absent) for n, (p, g) in pairs)

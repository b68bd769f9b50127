"""A training step whose forward and backward are not traced: autograd runs them, and a graph of the rest follows.

Before: batches of thirty lengths, and a traced step for each. After: a forward captured once with symbolic sizes, or
uncaptured; gradients by autograd; and one graph that unscales, clips, updates, and adjusts the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.step.lay_out_gradients import laid_out
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.step.step_graph import StepGraph
from amp_graph.step.step_parts import differentiate, first_bad, refuse_sparse
from amp_graph.step.trace_step import StepBuilder
from amp_graph.step.traced_step import CapturedStep


@dataclass(eq=False)
class PlainStep:
    """Runs steps of one captured forward; ``made`` is called with updates for which state was created.

    If the forward is uncaptured, the parameters with gradients may change from step to step. Only those are updated,
    as ``optimizer.step()`` skips parameters without a gradient.
    """

    builder: StepBuilder
    captured: CapturedStep
    last: bool
    made: Callable[[Sequence[GroupUpdate]], None]
    known: dict[tuple[Any, ...], StepGraph] = field(default_factory=dict)
    trained: list[Tensor] = field(default_factory=list)  # of the last call, in the order of their gradients

    @property
    def updates(self) -> list[GroupUpdate]:
        """The updates whose state is held here."""
        return [update for graph in self.known.values() for update in graph.updates]

    @property
    def update(self) -> str:
        """How the last of them updates, in words; "" if none does."""
        return next((graph.update for graph in reversed(self.known.values())), "")

    def __call__(self, *args: Any) -> Any:
        """Run the step on the forward's inputs and return what the forward returned."""
        outputs, grads = self._gradients(args)
        names = self.captured.names
        weights = {f"{names[i]} ({i})": args[i] for i in grads}
        with torch.no_grad():
            given = [laid_out(g, self.builder.state.target_of(args[i]), ()) for i, g in grads.items()]
            given = [*weights.values(), *_each_its_own(given), outputs[self.captured.loss]]
            graph = self._graph_for(args, grads, weights, given)
            self.trained = graph.parameters(given)
            if self.trained:
                graph(*given)
        return tuple(outputs)

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return the parameters trained in the last call, in the order of their gradients."""
        return self.trained

    def first_bad(self, args: Sequence[Any]) -> str:
        """Return the name of the first input whose gradient is not finite; runs the forward once more."""
        with torch.random.fork_rng():
            _, grads = self._gradients(args)
        return first_bad(self.captured.names, grads)

    def _gradients(self, args: Sequence[Any]) -> tuple[list[Any], dict[int, Tensor]]:
        """Return the outputs, and the existing gradients of the scaled loss by input number."""
        own, scale = self.builder.trained(args, (), {})[0], self.builder.loss_scale
        if scale is not None and own:
            scale.to(args[own[0]].device)
        with torch.enable_grad():
            outputs, given = self.captured.computed()(*args), None if scale is None else scale.scale
            parts = self.builder.micro_batches
            found = differentiate(outputs, self.captured.loss, [args[i] for i in own], given, parts)
        grads = {i: grad for i, grad in zip(own, found[1], strict=True) if grad is not None}
        for i, grad in grads.items():
            refuse_sparse(self.captured.names[i], grad)
        return found[0], grads

    def _graph_for(
        self, args: Sequence[Any], grads: Mapping[int, Tensor], weights: Mapping[str, Tensor], given: Sequence[Tensor]
    ) -> StepGraph:
        """Return the graph that updates exactly the inputs with gradients."""
        without = {i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in grads}
        trained, absent = self.builder.trained(args, without, self.builder.state.pending if self.last else {})
        key = (tuple(trained), tuple(map(id, absent.values())))
        found = self.known.get(key)
        if found is None:
            numbers = {i: n for n, i in enumerate(grads)}
            who = [i if i in absent else numbers[i] for i in trained], absent
            count = len(weights)
            found = self.builder.update_of(weights, given[count : 2 * count], given[-1], who, self.last)
            self.made(found.updates)
            self.known[key] = found
            self.captured.bound.trained = frozenset(id(args[i]) for i in trained if i not in absent)
        return found


def _each_its_own(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients without shared memory: autograd returns one tensor for both summands of ``b1 + b2``."""
    known: set[int | None] = set()
    found = []
    for grad in grads:
        key = storage_key(grad)
        found.append(grad.clone() if key in known else grad)
        known.add(key)
    return found

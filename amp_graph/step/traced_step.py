"""One captured forward with its loss, and the whole steps traced from it, by their parameters.

Before: ``model.head = heads[task]`` between two steps, under a graph that reads a copy of the old head. After: each
head has its own steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.graph.activation_checkpoints import outline_checkpoints
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import INPUT
from amp_graph.passes.torch_compat.fake import depends_on_data
from amp_graph.passes.weights.cast_weights import Hoisted, hoist_weight_casts
from amp_graph.rewrite import Rewritten
from amp_graph.step.step_graph import StepGraph

EMBEDDINGS = (F.embedding, F.embedding_bag)


@dataclass
class Bound:
    """The parameters of a captured forward's call, and the step traced for them."""

    parameters: tuple[Tensor, ...]
    step: StepGraph | None = None

    def is_within(self, alive: Collection[int]) -> bool:
        """Return whether all its parameters are among ``alive``, given by id."""
        return all(id(p) in alive for p in self.parameters)


@dataclass
class CapturedStep:
    """One captured forward with its loss, and the whole steps traced from it."""

    rewritten: Rewritten
    loss: int  # index of the loss among the graph's outputs
    names: list[str]  # of the inputs
    hoisted: list[Hoisted] = field(default_factory=list)  # weight casts that became inputs
    numbers: tuple[int, ...] | None = None  # the graph's inputs that are parameters; known after the first call
    bounds: list[Bound] = field(default_factory=list)  # the one in use first
    without: frozenset[int] = frozenset()  # inputs on which the loss does not depend
    refused: str = ""  # why no step can be traced

    def sparse_tables(self) -> Collection[int]:
        """Return the inputs that embeddings read whose gradients are sparse."""
        graph = self.rewritten.gm.graph
        inputs = {n: i for i, n in enumerate(graph.find_nodes(op="placeholder"))}
        calls = [(f, n) for f in EMBEDDINGS for n in graph.find_nodes(op="call_function", target=f)]
        given = [inspect.signature(f).bind(*n.args, **n.kwargs).arguments for f, n in calls]
        return [inputs[one["weight"]] for one in given if one.get("sparse") is True and one["weight"] in inputs]

    def depends_on_data(self) -> bool:
        """Return whether sizes or numbers in the graph depend on data."""
        return any(depends_on_data(value(node)) for node in self.rewritten.gm.graph.nodes)

    @property
    def bound(self) -> Bound:
        """The parameters of the last call, and their step."""
        return self.bounds[0]

    @property
    def step(self) -> StepGraph | None:
        """The step for the parameters of the last call."""
        return self.bounds[0].step if self.bounds else None

    def bind(self, args: Sequence[Any], owned: Callable[[], Collection[int]]) -> bool:
        """Select the steps for the parameters in ``args``; return whether they have replaced others.

        A module or a parameter may have been replaced, which no guard of a capture checks.
        owned: returns the tensors that the optimizer has, by id.
        """
        numbers = self._take_weights(args, owned()) if self.numbers is None else self.numbers
        for n, bound in enumerate(self.bounds):
            if all(map(is_, map(args.__getitem__, numbers), bound.parameters)):
                if n:
                    self.bounds.insert(0, self.bounds.pop(n))
                return False
        self.bounds.insert(0, Bound(tuple(args[i] for i in numbers)))
        return len(self.bounds) > 1

    def _take_weights(self, args: Sequence[Any], owned: Collection[int]) -> tuple[int, ...]:
        """Return the indices of inputs that are weights; turn their casts into inputs."""
        parameters = {i for i, a in enumerate(args) if isinstance(a, torch.nn.Parameter)}
        self.numbers = tuple(i for i, a in enumerate(args) if i in parameters or id(a) in owned)
        self.hoisted = hoist_weight_casts(self.rewritten.gm, parameters)
        outline_checkpoints(self.rewritten.gm, traced=True)
        return self.numbers


def names_of(gm: GraphModule) -> list[str]:
    """Return the names of a captured graph's inputs."""
    return [n.meta.get(INPUT, n.name) for n in gm.graph.nodes if n.op == "placeholder"]


def takes_symbols(gm: GraphModule) -> bool:
    """Return whether a captured graph has symbolic sizes or numbers."""
    given = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    sizes = [size for one in given for size in (one.shape if isinstance(one, Tensor) else (one,))]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)

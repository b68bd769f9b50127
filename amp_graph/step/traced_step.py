"""One captured forward with its loss, and the whole steps that were traced from it, by the parameters that it is given.

Before: ``model.head = heads[task]`` between two steps, under a graph that reads a copy of the old head. After: steps of
their own for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.optim.row_sparse_gradients import tables_of
from amp_graph.passes.graph.activation_checkpoints import outline_checkpoints
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import INPUT
from amp_graph.passes.torch_compat.symbolic_sizes import depends_on_data
from amp_graph.passes.weights.hoist_weight_casts import Hoisted, hoist_weight_casts

# Which step: one that only adds gradients up, one that updates, or one that also updates these parameters, by id, to
# which other micro-batches alone have sent gradients.
Kind = bool | frozenset[int]


@dataclass
class Bound:
    """The parameters that a captured forward was called with, and the steps that were traced for them."""

    parameters: tuple[Tensor, ...]
    steps: dict[Kind, Any] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()  # which of them, by id; known with the first step

    def kind(self, last: bool, pending: Collection[int]) -> Kind:
        """Return which step is to run: the ``last`` of a step's, after others have added up ``pending``, by id."""
        return last and (frozenset(pending).difference(self.trained) or True)

    def is_within(self, alive: Collection[int]) -> bool:
        """Say whether all its parameters are among ``alive``, given by id."""
        return all(id(p) in alive for p in self.parameters)


@dataclass
class CapturedStep:
    """One captured forward with its loss, and the whole steps traced from it."""

    rewritten: Any  # a Rewritten; None where the forward is not captured
    loss: int  # which of the graph's outputs it is
    hoisted: list[Hoisted] = field(default_factory=list)  # weight casts that became inputs
    numbers: tuple[int, ...] | None = None  # which of the graph's inputs are parameters; known with the first call
    bounds: list[Bound] = field(default_factory=list)  # the one in use first
    without: frozenset[int] = frozenset()  # inputs to which the loss sends no gradient

    def computed(self) -> Callable[..., Any]:
        """Return what computes the outputs from the inputs."""
        return self.rewritten.gm.forward

    def input_names(self) -> list[str]:
        """Return the names of the inputs."""
        return names_of(self.rewritten.gm)

    def tables(self, *, sparse: bool = False) -> Collection[int]:
        """Return which inputs are read as tables of embeddings, and in no other way; ``sparse``: by sparse ones."""
        return tables_of(self.rewritten.gm, sparse=sparse)

    def depends_on_data(self) -> bool:
        """Say whether sizes, or numbers, in the graph depend on data."""
        return any(depends_on_data(value(node)) for node in self.rewritten.gm.graph.nodes)

    @property
    def bound(self) -> Bound:
        """What belongs to the parameters of the last call."""
        return self.bounds[0]

    @property
    def steps(self) -> dict[Kind, Any]:
        """The steps for the parameters of the last call."""
        return self.bounds[0].steps if self.bounds else {}

    def bind(self, args: Sequence[Any], owned: Callable[[], Collection[int]]) -> bool:
        """Take up the steps for the parameters among ``args``; say whether these came in the place of others.

        A module or a parameter may have been put in the place of another, which no guard of a capture looks at.
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
        """Make inputs of the casts of weights, which the first call tells apart; return which inputs weights are."""
        gm = self.rewritten.gm
        self.numbers = _weights_among(args, owned)
        self.hoisted = hoist_weight_casts(gm, [i for i in self.numbers if isinstance(args[i], torch.nn.Parameter)])
        outline_checkpoints(gm, traced=True)
        return self.numbers


@dataclass
class PlainCaptured(CapturedStep):
    """A forward with its loss of which no step is traced: captured for any sizes, or as it is written.

    Weights are cast in it, and autograd runs behind it.
    """

    names: list[str] = field(default_factory=list)
    forward: Callable[..., Any] | None = None

    def computed(self) -> Callable[..., Any]:
        """Return what computes the outputs from the inputs."""
        assert self.forward is not None, "set where it is made"
        return self.forward

    def input_names(self) -> list[str]:
        """Return the names of the inputs."""
        return self.names

    def tables(self, *, sparse: bool = False) -> Collection[int]:
        """Return none: gradients of tables are as autograd makes them."""
        return ()

    def depends_on_data(self) -> bool:
        """Say no: what is traced is autograd's run of the forward."""
        return False

    def _take_weights(self, args: Sequence[Any], owned: Collection[int]) -> tuple[int, ...]:
        self.numbers = _weights_among(args, owned)
        return self.numbers


def names_of(gm: GraphModule) -> list[str]:
    """Return the names of a captured graph's inputs."""
    return [n.meta.get(INPUT, n.name) for n in gm.graph.nodes if n.op == "placeholder"]


def takes_symbols(gm: GraphModule) -> bool:
    """Say whether a captured graph is for inputs of several sizes, or numbers."""
    given = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    sizes = [size for one in given for size in (one.shape if isinstance(one, Tensor) else (one,))]
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


def _weights_among(args: Sequence[Any], owned: Collection[int]) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(args) if isinstance(a, torch.nn.Parameter) or id(a) in owned)

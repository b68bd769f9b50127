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

from amp_graph.passes.checkpoints import outline_checkpoints
from amp_graph.passes.hoist_weight_casts import Hoisted, hoist_weight_casts
from amp_graph.rewrite import Rewritten
from amp_graph.step_graph import StepGraph

# Which step: one that only adds gradients up, one that updates, or one that also updates these parameters, by id, to
# which other micro-batches alone have sent gradients.
Kind = bool | frozenset[int]


@dataclass
class Bound:
    """The parameters that a captured forward was called with, and the steps that were traced for them."""

    parameters: tuple[Tensor, ...]
    steps: dict[Kind, StepGraph] = field(default_factory=dict)
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

    rewritten: Rewritten
    loss: int  # which of the graph's outputs it is
    hoisted: list[Hoisted] = field(default_factory=list)  # weight casts that became inputs
    numbers: tuple[int, ...] | None = None  # which of the graph's inputs are parameters; known with the first call
    bounds: list[Bound] = field(default_factory=list)  # the one in use first
    without: frozenset[int] = frozenset()  # inputs to which the loss sends no gradient

    @property
    def bound(self) -> Bound:
        """What belongs to the parameters of the last call."""
        return self.bounds[0]

    @property
    def steps(self) -> dict[Kind, StepGraph]:
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
        self.numbers = tuple(i for i, a in enumerate(args) if isinstance(a, torch.nn.Parameter) or id(a) in owned)
        self.hoisted = hoist_weight_casts(gm, [i for i in self.numbers if isinstance(args[i], torch.nn.Parameter)])
        outline_checkpoints(gm, traced=True)
        return self.numbers

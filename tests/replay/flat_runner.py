"""Runs a captured graph flat, without recording it: what a replay does, operation by operation.

Before: ``run(*args)`` under autograd. After: ``FlatRunner(gm)(*args)``, whose backward is one autograd node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.replay.flat_graph import Flat
from amp_graph.replay.replayed_call import outputs_of
from amp_graph.replay.trace_flat import FlatGraphs, Key, key_of


@dataclass(eq=False)
class FlatCall:
    """One call of flat graphs: the values that its backward reads."""

    graphs: FlatGraphs
    saved: Sequence[Tensor]

    @property
    def flat(self) -> Flat:
        """The graphs of the call."""
        return self.graphs.flat

    def gradients(self, kept: Sequence[Tensor], given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the flat backward."""
        found = self.graphs.backward(given)
        if found is None:
            return [None for _ in self.flat.routes]
        return found[1](*kept, *self.saved, *(g for g in given if g is not None))


class FlatRunner:
    """Runs a captured graph flat, tracing it for each kind of arguments."""

    def __init__(self, gm: GraphModule) -> None:
        """Nothing is traced yet."""
        self.gm = gm
        self.traced: dict[Key, FlatGraphs] = {}

    def __call__(self, *args: Any) -> list[Any]:
        """Run one call; raises CannotRecord."""
        key = key_of(args)
        if key not in self.traced:
            self.traced[key] = FlatGraphs(self.gm, args)
        graphs = self.traced[key]
        flat = graphs.flat
        with torch.no_grad():
            found = flat.run_forward(*(args[i] for i in flat.tensors))
        return outputs_of(FlatCall(graphs, found[flat.made :]), found[: flat.made], args)

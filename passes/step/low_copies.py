"""Write the low-precision copies of weights behind their update, for the next forward to read.

Before: each forward casts each weight. After: each weight is cast at most once per dtype and optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.base import Change, Pass, PassResult, Writes
from amp_graph.passes.loss_scaling.append import append
from amp_graph.passes.loss_scaling.joint_graph import input_nodes, parameter_nodes
from amp_graph.passes.torch_compat.operators import foreach_copy_


def write_copies(lows: Sequence[Tensor], fulls: Sequence[Tensor], pointwise: bool) -> None:
    """Round ``fulls`` into ``lows``; ``pointwise``: one by one, for a compiler to fuse."""
    if pointwise:
        for low, full in zip(lows, fulls, strict=True):
            low.copy_(full)
    elif lows:
        foreach_copy_(list(lows), list(fulls))


@dataclass(frozen=True)
class WriteLowCopies(Pass):
    """Rounds what is updated into ``copies``: by name of parameter, the inputs of the graph that hold its copies.

    Law: each copy is the updated parameter, or master, cast to the copy's dtype. Exactness: bit-exact.
    """

    copies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pointwise: bool = False

    name: ClassVar[str] = "write-low-copies"
    required: ClassVar[bool] = True
    writes: ClassVar[Writes] = Writes.APPENDED

    def run(self, gm: GraphModule) -> PassResult:
        """Append the casts."""
        known = input_nodes(gm)
        fulls = dict(zip(self.copies, parameter_nodes(gm, list(self.copies)), strict=True))
        pairs = [(known[low], fulls[name]) for name, lows in self.copies.items() for low in lows]
        if not pairs:
            return PassResult(gm)
        append(gm, write_copies, [low for low, _ in pairs], [full for _, full in pairs], self.pointwise)
        return PassResult(gm, (Change("low copies", "write copies", pairs[0][0].name, f"{len(pairs)} casts"),))

"""Let dropout on the CPU draw by vectors, and save one bit per element.

Before: ``dropout(x, 0.1, training=True)``.
After: ``dropout_in_bits(x, 0.1, training=True)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.pointwise.bitmask_dropout import dropout_in_bits, library
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import CHECKPOINT, REGION, TRANSFORM
from amp_graph.passes.op_args.dropout_args import given_to
from amp_graph.passes.profitability.thresholds import dropout_in_bits_is_profitable


@dataclass(frozen=True)
class LowerDropout(Pass):
    """Replaces ``dropout`` that trains with compiled C, when it is profitable.

    Law: the same draws of torch's default generator, in the same order, of which a bit is saved instead of the noise.
    Exactness: bit-exact, values, gradients, and later draws.
    """

    name: ClassVar[str] = "lower-dropout"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every dropout."""
        changes = []
        for node in gm.graph.nodes:
            given = given_to(node)
            if given is None or not _fits(node, *given):
                continue
            x, p = given[:2]
            node.target, node.args, node.kwargs = dropout_in_bits, (x, p), {}
            changes.append(Change(self.name, "drawn by vectors", node.name, "torch's draws, one bit saved for each"))
        return PassResult(gm, tuple(changes))


def _fits(node: Node, x: Any, p: Any, trains: Any, in_place: bool) -> bool:
    if in_place or trains is not True or not isinstance(p, float) or not 0 < p < 1:
        return False
    made, source = value(node), value(x)
    if not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta) or not isinstance(made, torch.Tensor):
        return False
    profitable = made.dtype == source.dtype and dropout_in_bits_is_profitable(made.device.type, made.numel())
    return profitable and library(made.dtype) is not None

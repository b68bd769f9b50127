"""Let sums, means and norms read low precision directly, where their kernels upcast what they read.

Before: ``h.float().sum(-1)``, which writes and reads an fp32 copy of ``h``.
After: ``h.sum(-1, dtype=torch.float32)``, as ``torch.autocast`` does on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import Identity
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, IDENTITY, REGION, TRANSFORM
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.profitability.thresholds import reducing_from_low_is_profitable

REDUCTIONS = frozenset({"aten.sum", "aten.mean", "aten.prod", "aten.linalg_vector_norm"})


@dataclass(frozen=True)
class FoldUpcastsIntoReductions(Pass):
    """Replaces ``x.float().sum(...)`` with ``x.sum(..., dtype=torch.float32)``, when it is profitable.

    Law: an inserted cast from low precision with no other reader, of memory that is not written in between; one
    operation whose ``dtype`` argument is not set. Exactness: rounding-equal, by another order of the sum.
    """

    device: str
    name: ClassVar[str] = "fold-upcasts-into-reductions"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every reduction of a cast."""
        if not reducing_from_low_is_profitable(self.device):
            return PassResult(gm)
        changes, lifetimes = [], Lifetimes.of(gm)
        for node in list(gm.graph.nodes):
            cast = _cast_before(node)
            if cast is None:
                continue
            source: Any = cast.args[0]
            if lifetimes.is_written_between(source, cast, node):
                continue
            node.replace_input_with(cast, source)
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            gm.graph.erase_node(cast)
            changes.append(Change(self.name, "reads low precision", node.name, f"its kernel upcasts {source.name}"))
        return PassResult(gm, tuple(changes))


def _cast_before(node: Node) -> Node | None:
    """Return the cast to fp32 that only ``node`` reads, if it is a reduction that does not need it."""
    found = node.meta.get(IDENTITY)
    if not isinstance(found, Identity) or len(found.operations) != 1 or node.kwargs.get("dtype") is not None:
        return None
    (one,) = found.operations
    if found.names[0] not in REDUCTIONS or one.arguments.get("dtype", ...) is not None:
        return None
    if not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return None
    inputs = node.all_input_nodes
    if len(inputs) != 1 or CAST not in inputs[0].meta or len(inputs[0].users) != 1:
        return None
    cast = inputs[0]
    (source,) = cast.all_input_nodes
    return cast if cast.target == "float" and value(source).dtype in HALVES else None

"""Keep recurrent layers whole in graphs for compilers, which would otherwise take them apart step by step.

Before: ``torch.lstm(x, (h, c), weights, ...)``. After: ``recurrent_whole("lstm", x, (h, c), weights, ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes import facts
from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.identify_ops import OPS, Identity
from amp_graph.passes.recurrent_layers import KINDS, recurrent_whole

ATEN = {getattr(torch.ops.aten, kind).input: kind for kind in KINDS}
NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


@dataclass(frozen=True)
class KeepRecurrent(Pass):
    """Replaces ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` with ``recurrent_whole``.

    Law: layers over padded batches; those over packed sequences stay. On every device. Exactness: bit-exact;
    gradients rounding-equal, with their sums in another order.
    """

    name: ClassVar[str] = "keep-recurrent"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every recurrent layer."""
        changes = []
        for node in gm.graph.nodes:
            op = _recurrent(node)
            if op is None:
                continue
            given = facts.schema_arguments(op, node.args, dict(node.kwargs))
            hidden: Any = given["hx"] if ATEN[op] == "lstm" else [given["hx"]]
            node.target, node.kwargs = recurrent_whole, {}
            node.args = (ATEN[op], given["input"], hidden, *(given[name] for name in NAMES))
            changes.append(Change(self.name, "kept whole", node.name, "its steps are no business of a compiler's"))
        return PassResult(gm, tuple(changes))


def _recurrent(node: Node) -> Any:
    """Return the operator of a recurrent layer over a padded batch; None for any other node."""
    found = node.meta.get(OPS)
    if node.op != "call_function" or node.target is recurrent_whole or not isinstance(found, Identity):
        return None
    return next((o.op for o in found.operations if len(found.operations) == 1 and o.op in ATEN), None)

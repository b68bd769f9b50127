"""Increment the batch counters of all batch norms in one call, where a call costs more than an increment: on GPUs.

Before: ``tracked_1.add_(1); ...; tracked_53.add_(1)``.
After: ``torch._foreach_add_([tracked_1, ..., tracked_53], 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.meta_keys import MODULE
from amp_graph.passes.profitability.thresholds import few_calls_are_profitable
from amp_graph.passes.torch_compat.storage import storage_key


@dataclass(frozen=True)
class BatchNormCounters(Pass):
    """Replaces ``counter.add_(1)`` of several counters with one call for all, when it is profitable.

    Law: each is an input of the graph, a separate tensor that nothing else reads. Exactness: bit-exact.
    """

    device: str
    name: ClassVar[str] = "batch-norm-counters"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every increment."""
        counts = [n for n in gm.graph.nodes if _counts(n)] if few_calls_are_profitable(self.device) else []
        if len({storage_key(value(n)) for n in counts}) < max(2, len(counts)):
            return PassResult(gm)
        with gm.graph.inserting_before(counts[-1]):
            made = gm.graph.call_function(torch._foreach_add_, ([n.args[0] for n in counts], 1))
        made.meta = {k: v for k, v in counts[-1].meta.items() if k in ("stack_trace", "nn_module_stack", MODULE)}
        for node in counts:
            gm.graph.erase_node(node)
        return PassResult(gm, (Change(self.name, "counted together", made.name, f"{len(counts)} counters"),))


def _counts(node: Node) -> bool:
    if (node.op, node.target) != ("call_method", "add_") or node.args[1:] != (1,) or node.kwargs or node.users:
        return False
    counter, one = node.args[0], value(node)
    alone = isinstance(counter, Node) and counter.op == "placeholder" and len(counter.users) == 1
    return alone and isinstance(one, torch.Tensor) and one.dtype == torch.int64 and one.dim() == 0

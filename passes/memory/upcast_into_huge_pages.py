"""Upcast large values into memory on huge pages, with non-temporal stores.

Before: ``logits.float()``, 42 MB, 10,240 page faults.
After: ``widen(logits)``, about 20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, REGION, TRANSFORM
from amp_graph.passes.memory.huge_pages import widen
from amp_graph.passes.profitability.thresholds import large_pages_are_profitable
from amp_graph.passes.torch_compat.fake import numel


@dataclass(frozen=True)
class UpcastIntoHugePages(Pass):
    """Replaces the cast ``x.float()`` with ``widen(x)`` when its result is mapped anew at each call.

    Law: a cast that amp_graph inserted, large enough to be profitable, outside of regions. Exactness: bit-exact.
    """

    name: ClassVar[str] = "upcast-into-huge-pages"

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every cast to fp32."""
        changes = []
        for node in gm.graph.find_nodes(op="call_method", target="float"):
            if CAST in node.meta and len(node.args) == 1 and not node.kwargs and _is_large(node):
                node.op, node.target = "call_function", widen
                changes.append(Change(self.name, "on huge pages", node.name, type_text(value(node))))
        return PassResult(gm, tuple(changes))


def _is_large(node: Node) -> bool:
    made = value(node)
    if not isinstance(made, torch.Tensor) or not {REGION, TRANSFORM, CHECKPOINT}.isdisjoint(node.meta):
        return False
    return large_pages_are_profitable(made.device.type, made.element_size() * numel(made))

"""Write the gradient of a loss's logits over the logits, in flat graphs of whole steps.

Before: ``g = cross_entropy_backward(grad, logits, ...)``, a second tensor of the size of the logits.
After: ``g = cross_entropy_backward_(grad, logits, ...)``: the logits' own memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import OPS
from amp_graph.passes.base import Change, Skip, Writes
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.graph_text import type_text
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.torch_compat.fake import FakeTensorMode, is_contiguous


@dataclass(frozen=True)
class LogitsGradientInPlace(NodePass):
    """Replaces ``cross_entropy_backward`` with ``cross_entropy_backward_`` when it is the last to read its logits.

    Law: the graph made the logits, whole and contiguous, and does not read their memory later. Exactness: bit-exact.
    Saves their size while the head's gradients are made, and the time to map it: glibc maps a new tensor of 32 MiB or
    more page by page at each step. For graphs that run as they are: a compiler plans memory itself.
    """

    writes: ClassVar[Writes] = Writes.OWN

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Let a gradient of logits be written over them."""
        if node.target is not OPS.cross_entropy_backward.default:
            return None
        logits = node.args[1]
        assert isinstance(logits, Node), "an operator's logits are a tensor"
        if not _may_go(node, logits, Lifetimes.of(gm)):
            return Skip(node.name, f"{logits.name} is read again, not the graph's own, or not contiguous")
        node.target = OPS.cross_entropy_backward_.default
        return Change(self.name, "over the logits", node.name, f"{type_text(value(node))} less")


def _may_go(node: Node, logits: Node, lives: Lifetimes) -> bool:
    memory = lives.roots[logits]
    apart = all(memory.isdisjoint(lives.roots[n]) for n in node.all_input_nodes if n is not logits)
    return apart and is_contiguous(value(logits)) and lives.is_done_after(logits, node, node)

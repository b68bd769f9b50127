"""A pass that looks at one node at a time: what most rewrites are.

Before: a loop over the nodes, with lists of changes and of skips. After: ``visit(gm, node, mode)``, which returns the
change, or the reason why the node stays.
"""

from __future__ import annotations

import abc

from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, PassResult, Skip
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.torch_compat.fake import FakeTensorMode


class NodePass(Pass):
    """A pass for which the nodes that it has changed make no difference to those that follow."""

    @abc.abstractmethod
    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Rewrite ``node`` in place and return what changed, or why it stays; None if the pass is not about it."""

    def run(self, gm: GraphModule) -> PassResult:
        """Visit every node that the graph has now, in order; a graph without tensors has none to rewrite."""
        mode = fake_mode_of(gm)
        found = [self.visit(gm, node, mode) for node in list(gm.graph.nodes)] if mode is not None else []
        changes = tuple(one for one in found if isinstance(one, Change))
        return PassResult(gm, changes, tuple(one for one in found if isinstance(one, Skip)))

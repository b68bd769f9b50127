"""A pass that looks at one node at a time: what most rewrites are.

Before: a loop over the nodes, with lists of changes and of skips. After: ``visit(gm, node, mode)``, which returns the
change, or the reason why the node stays.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change, Pass, Skip
from amp_graph.passes.graph.fake_values import fake_mode_of
from amp_graph.passes.torch_compat.fake import FakeTensorMode


class NodePass(Pass, abc.ABC):
    """A pass for which the nodes that it has changed make no difference to those that follow."""

    @abc.abstractmethod
    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | Skip | None:
        """Rewrite ``node`` in place and return what changed, or why it stays; None if the pass is not about it."""

    def rewrite(self, gm: GraphModule) -> Iterator[Change | Skip]:
        """Visit every node that the graph has now, in order; a graph without tensors has none to rewrite."""
        mode = fake_mode_of(gm)
        for node in list(gm.graph.nodes):
            if mode is not None and (told := self.visit(gm, node, mode)) is not None:
                yield told

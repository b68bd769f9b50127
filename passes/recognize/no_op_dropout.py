"""Remove dropout that drops nothing.

Before: ``linear(dropout(gelu(x), 0.1, training=False), w)``. After: ``linear(gelu(x), w)``: one call less, and passes
that fuse or recompute activations see the linear as the reader of the GELU. Every graph needs it: the fake result of
such a dropout is a clone (torch/_decomp/decompositions.py), so a write to the real one would not be seen as a write to
its input.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from amp_graph.passes.base import Change
from amp_graph.passes.graph.call_arguments import given_to
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.meta_keys import RETURNED
from amp_graph.passes.graph.node_pass import NodePass
from amp_graph.passes.torch_compat.fake import FakeTensorMode
from amp_graph.passes.torch_compat.storage import storage_key


@dataclass(frozen=True)
class RemoveNoOpDropout(NodePass):
    """Replaces ``dropout(x, p, training)`` by ``x`` when ``training`` is False, or ``p`` is 0.

    Law: torch itself returns the same tensor object then (aten/src/ATen/native/Dropout.cpp). An in-place dropout stays.
    Exactness: bit-exact.
    """

    def visit(self, gm: GraphModule, node: Node, mode: FakeTensorMode) -> Change | None:
        """Remove a dropout."""
        given = given_to(node)
        if given is None or not (given["train"] is False or (given["p"] == 0 and given["train"] is True)):
            return None
        source: Node = given["input"]
        # Dynamo's fake dropout is a clone: record its storage as that of the argument.
        keys = {key for t in tensors(captured(node)) if (key := storage_key(t)) is not None}
        source.meta[RETURNED] = source.meta.get(RETURNED, frozenset()) | keys
        node.replace_all_uses_with(source)
        gm.graph.erase_node(node)
        return Change(self.name, "deleted", node.name, "it drops nothing")

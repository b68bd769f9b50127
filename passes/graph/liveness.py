"""Liveness of the memory of each value in a graph of ATen operators, aliases included.

Before: ``s = add(x, y)``, a new tensor. After: ``is_done_after(x, s, s)`` says whether ``x`` could hold the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.graph.meta_keys import IDENTITY
from amp_graph.passes.torch_compat.dispatch import OpOverload
from amp_graph.passes.torch_compat.fake import numel
from amp_graph.passes.torch_compat.operators import UNSAFE_VIEW


@dataclass
class Lifetimes:
    """The nodes that allocated the memory of each value (its ``roots``), its last reader, and its writes.

    Aliases come from the operators' schemas; a call without a schema may return any of its inputs.
    """

    order: dict[Node, int] = field(default_factory=dict)
    roots: dict[Node, frozenset[Node]] = field(default_factory=dict)
    reads: dict[Node, list[int]] = field(default_factory=dict)
    writes: dict[Node, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(gm: GraphModule) -> Lifetimes:
        """Read the lifetimes off a graph, in one walk."""
        found = Lifetimes()
        for place, node in enumerate(gm.graph.nodes):
            found.order[node] = place
            found.roots[node] = found._find_roots(node)
            for source in (node, *node.all_input_nodes):
                for root in found.roots[source]:
                    found.reads.setdefault(root, []).append(place)
            for root in found.memory_written_by(node):
                found.writes.setdefault(root, []).append(place)
        return found

    def is_done_after(self, node: Node, place: Node, reader: Node) -> bool:
        """Say whether the graph allocated the memory of ``node``, and only ``reader`` reads it after ``place``."""
        memory, end, one = self.roots[node], self.order[place], self.order[reader]
        made_here = len(memory) == 1 and all(m.op == "call_function" for m in memory)
        return made_here and all(p <= end or p == one for m in memory for p in self.reads[m])

    def is_written_between(self, node: Node, first: Node, last: Node) -> bool:
        """Say whether a node after ``first`` and before ``last`` writes to the memory of ``node``."""
        start, end = self.order[first], self.order[last]
        return any(start < place < end for m in self.roots[node] for place in self.writes.get(m, ()))

    def memory_written_by(self, node: Node) -> frozenset[Node]:
        """Return the nodes that allocated the memory to which ``node`` writes."""
        return self._of_all(node_info.written_by_name(node) if isinstance(node.target, OpOverload) else ())

    def _of_all(self, nodes: Iterable[Node]) -> frozenset[Node]:
        return frozenset().union(*(self.roots[n] for n in nodes))

    def _find_roots(self, node: Node) -> frozenset[Node]:
        own = frozenset((node,))
        if node.op != "call_function":
            return own
        if node.target is operator.getitem:
            source = self.roots[node.all_input_nodes[0]]
            # Each part of a new result has its own memory.
            return own if source == {node.all_input_nodes[0]} else source
        if not isinstance(node.target, OpOverload):
            return own | self._of_all(node.all_input_nodes)
        if node.target is UNSAFE_VIEW:  # its schema does not declare the alias
            return self._of_all(node.all_input_nodes)
        aliased = node_info.nodes_named(node, node.target, node_info.returned_arguments(node.target))
        return self._of_all(aliased) or own


# -- the memory that a node allocates -----------------------------------------------------------------


def written(node: Node) -> list[torch.Tensor]:
    """Return the tensors that ``node`` creates, each once, without those that it passes through."""
    handed_on = {id(t) for source in node.all_input_nodes for t in tensors(value(source))}
    return list({id(t): t for t in tensors(value(node)) if id(t) not in handed_on}.values())


def writes_memory(node: Node) -> bool:
    """Say whether ``node`` allocates tensors: it is no view, no in-place write and no part of a result."""
    if node.op not in ("call_function", "call_method") or is_part(node) or node_info.is_higher_order(node):
        return False
    operations = node.meta.get(IDENTITY)
    return operations is None or not all(node_info.is_view(o.op) or node_info.is_mutable(o.op) for o in operations)


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``'s elements."""
    return tensor.element_size() * numel(tensor)

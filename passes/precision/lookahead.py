"""Find which nodes lead to low-precision operations, from the classes of the nodes alone.

Before: ``transpose (neutral) -> linear (allow)``. After: the transpose leads to low precision; a cast may come before
it, since all of its readers take low precision.
"""

from __future__ import annotations

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.aliasing import written_inside
from amp_graph.passes.graph.fake_values import captured, is_eligible
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.conditioning import leads_to_softmax
from amp_graph.passes.precision.planning_problem import FREE, Problem
from amp_graph.passes.torch_compat.fake import numel

IN_PLACE = frozenset({"aten.add_", "aten.sub_"})


class Lookahead:
    """Which nodes of ``problem`` lead to low precision, and which storages must be full.

    ``low``: nodes from which an ``allow`` operation is reached. ``early``: neutral nodes before which a cast may go.
    ``full``: storages that must be full. ``shown``: nodes that alias an input written later, each with that input.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.classes = problem, problem.classes
        self.shown = self._shown()
        self.low = self._reached()
        self.full = self._written_in_full()
        self.early: set[Node] = set()
        self._find_early()

    def takes_low(self, user: Node, node: Node) -> bool:
        """Say whether ``user`` reads ``node`` in low precision, itself or as a node of ``early``."""
        kind = self.classes.get(user)
        return kind is not None and (
            user in self.early or (kind.cls is OpClass.ALLOW and node in kind.applies and not kind.written)
        )

    def _reached(self) -> set[Node]:
        """Return the nodes from which an ``allow`` operation is reached through free operations."""
        found: set[Node] = set()
        for node in reversed(self.problem.gm.graph.nodes):
            for user in node.users:
                kind = self.classes.get(user)
                part = kind is None and is_part(user) and user in found
                leads = kind is not None and (kind.cls is OpClass.ALLOW or (kind.cls in FREE and user in found))
                if part or (leads and kind is not None and node in kind.applies):
                    found.add(node)
                    break
        return found

    def _find_early(self) -> None:
        """Find the neutral nodes before which a cast may go: every reader takes low precision.

        The node must not make the value smaller (a cast before a slice would convert more than needed), and nothing
        may write to it.
        """
        for node in reversed(self.problem.gm.graph.nodes):
            kind = self.classes.get(node)
            if kind is None or kind.cls is not OpClass.NEUTRAL or len(kind.applies) != 1 or kind.dtype:
                continue
            (source,) = kind.applies
            if self.problem.memory.is_written(node) or not is_eligible(captured(node)):
                continue
            if not is_eligible(captured(source)) or _grows(node, source):
                continue
            if is_leaf(source) and not _grows(source, node):
                continue  # its cast is shared by all readers, which may read other views of it
            if len(node.users) > 1 and captured(node).requires_grad and not _grows(source, node):
                continue  # all readers share a cast after the node, and its backward sums their gradients in fp32
            if node.users and all(self.takes_low(user, node) for user in node.users):
                self.early.add(node)

    def _shown(self) -> dict[Node, Node]:
        """Return the nodes that alias an input which is written after them, each with one such input."""
        found: dict[Node, Node] = {}
        for node in self.problem.gm.graph.nodes:
            kind = self.classes.get(node)
            if node.op not in ("placeholder", "get_attr", "output") and not (
                kind and (kind.written or kind.conversion)
            ):
                sources = [s for s in self.problem.memory.aliased(node) if is_eligible(captured(s))]
                found.update((node, s) for s in sources[:1])
        return found

    def _written_in_full(self) -> set[int]:
        """Return the storages that must stay in full precision.

        * those that a ``deny`` or opaque operation writes;
        * written ones that such an operation, or one with several operands, aliases: it takes full precision, and a
          cast before it would break the alias;
        * written ones of which the user made a conversion that did nothing at capture: the alias would become a copy;
        * those of overlapping outputs, whose captured precision is restored;
        * those of scores to which a mask is added in place: what a softmax reads is not rounded after such a sum.
        """
        memory, storages = self.problem.memory, self.problem.memory.storages
        found = set(memory.leaving) if self.problem.keep_outputs else set()  # each output by a cast of its own
        for node, kind in self.classes.items():
            alias = kind.conversion and any(storages[node] & storages[s] for s in node.all_input_nodes)
            if alias and memory.is_written(node):
                found |= storages[node]
        for node in self.shown:
            if not self._follows(node):
                found = found.union(*memory.aliased(node).values())
        for node in self.problem.gm.graph.nodes:
            known = self.classes.get(node)
            if known is None and not is_part(node):  # a higher-order operator takes the dtypes it was captured with
                found = found.union(*(storages[n] for n in written_inside(self.problem.gm, node)))
            elif known is not None and known.cls in (OpClass.DENY, OpClass.OPAQUE, OpClass.PROMOTE):
                found = found.union(*(storages.get(target, frozenset()) for target in known.written))
        return found | self._masked_in_place() if self.problem.lists.unlisted == "opaque" else found

    def _masked_in_place(self) -> set[int]:
        storages = self.problem.memory.storages
        added = [n for node, kind in self.classes.items() if IN_PLACE.issuperset(kind.names) for n in kind.written]
        written = set[int]().union(*(storages.get(n, frozenset()) for n in added))
        leads = leads_to_softmax(self.problem.gm.graph.nodes, self.classes) if written else ()
        return written & set[int]().union(*(storages.get(n, frozenset()) for n in leads))

    def _follows(self, node: Node) -> bool:
        """Say whether ``node`` can alias its input in either precision."""
        kind = self.classes.get(node)
        if kind is None:
            return is_part(node)
        return kind.cls in FREE and sum(is_eligible(captured(s)) for s in node.all_input_nodes) == 1


def is_leaf(node: Node) -> bool:
    """Say whether ``node`` is an input or a parameter: a gather from one must not cast the whole of it."""
    return node.op in ("placeholder", "get_attr")


def _grows(source: Node, node: Node) -> bool:
    """Say whether ``node`` has more elements than ``source``."""
    return numel(captured(node)) > numel(captured(source))

"""The rule-based planner: choose low or full precision for every node, from classes and lookahead alone.

Before: ``linear (allow) -> add (follow) -> layer_norm (fp32_inside) -> linear (allow)``. After: with accuracy
"autocast" the mixed add and the norm stay full; with "fast" everything between the linears is low.

It decides what the accuracy permits; ``mincut`` decides what of that is profitable. Sources: TensorFlow's
auto_mixed_precision.cc for the graph painting; torch/csrc autocast for the promotion rule, which leaves mixed operands
to the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, has_eligible, is_eligible, value
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.conditioning import kept_as_in_autocast
from amp_graph.passes.precision.lookahead import Lookahead, is_leaf
from amp_graph.passes.precision.planning_problem import AS_CAPTURED, FREE, FULL, LOW, Choice, Problem

ADDITIONS = frozenset({"aten.add", "aten.sub", "aten.add_", "aten.sub_"})
# Their backward sums the gradients of elements that were read more than once, in the precision of the result.
GATHERS = frozenset(
    f"aten.{name}"
    for name in (
        "embedding", "gather", "index_select", "index", "_unsafe_index", "take", "take_along_dim", "masked_select",
        "repeat_interleave",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """The inputs of a node, grouped by the precision in which the node reads them.

    ``moved``: the node's own precision. ``promoted``: the same, but a full-precision node also accepts
    low-precision operands without a cast. ``beside``: always full precision.
    """

    moved: tuple[Node, ...] = ()
    promoted: tuple[Node, ...] = ()
    beside: tuple[Node, ...] = ()


def operands(node: Node, kind: Classification) -> Operands:
    """Return the inputs of a node whose precision is free, or allowed, grouped by how the node reads them.

    A neutral operation reads only the shape of operands to which its class does not apply. A scalar beside larger
    operands does not take part in promotion.
    """
    inputs = [n for n in node.all_input_nodes if is_eligible(captured(n))]
    moved = tuple(n for n in inputs if n in kind.applies)
    beside = tuple(n for n in inputs if n not in kind.applies)
    if kind.cls in (OpClass.ALLOW, OpClass.PROMOTE):
        return Operands(moved, (), beside if kind.cls is OpClass.ALLOW else ())
    beside = () if kind.cls is OpClass.NEUTRAL else beside
    counted = tuple(without_scalars(moved)) if kind.mixed else moved
    return Operands((), counted, beside) if kind.mixed and len(counted) > 1 else Operands(counted, (), beside)


def paint(problem: Problem) -> dict[Node, Choice]:
    """Choose a precision for every classified node of ``problem``."""
    return RuleBasedPlan(problem).run()


class RuleBasedPlan:
    """One run of the planner: the precision of each value so far, and the lookahead of each node.

    Makes everything low that the accuracy permits, profitable or not; a planner by cost chooses from that.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.classes = problem.classes
        self.fast = problem.accuracy == "fast"
        self.low: set[Node] = set()
        self.tainted: set[Node] = set()  # full because a deny operation made it so
        self.ahead = Lookahead(problem)
        self.kept = {} if problem.accuracy == "autocast" else self._kept()

    def run(self) -> dict[Node, Choice]:
        """Choose for the nodes in graph order."""
        choices: dict[Node, Choice] = {}
        for node in self.problem.gm.graph.nodes:
            if node in self.classes:
                choices[node] = self._choose(node, self.classes[node])
            elif is_part(node) and is_eligible(captured(node)):
                whole = node.args[0]
                self.low |= {node} if whole in self.low else set()
                self.tainted |= {node} if whole in self.tainted else set()
        return choices

    # -- the choice -----------------------------------------------------------------------------------

    def _choose(self, node: Node, kind: Classification) -> Choice:
        inputs = [n for n in node.all_input_nodes if is_eligible(captured(n))]
        moved = [n for n in inputs if n in kind.applies]
        if not inputs and not has_eligible(node):
            return Choice(AS_CAPTURED, "carries no fp32 value")
        if kind.conversion:
            return self._conversion(node, kind, moved)
        target = next((n for n in inputs if n in kind.written), self.ahead.shown.get(node))
        if target is not None:
            self.low |= {node} if target in self.low and has_eligible(node) else set()
            return self.follow(node, kind, LOW if target in self.low else FULL)
        listed = f"{', '.join(kind.names)}: {kind.why}"
        if (kind.cls is OpClass.ALLOW and moved) or (
            kind.cls is OpClass.PROMOTE and moved and self.low.issuperset(moved)
        ):
            return self._set_low(node, kind, inputs if kind.cls is OpClass.ALLOW else moved, listed)
        if kind.cls is OpClass.DENY:
            self.tainted.add(node)
            return Choice(FULL, listed, dict.fromkeys(inputs, FULL))
        if kind.cls is OpClass.OPAQUE and kind.takes_dtype and _is_like(kind):
            return Choice(AS_CAPTURED, f"{kind.why}; only the shape of its operand counts", asks_dtype=True)
        if kind.cls is OpClass.OPAQUE:
            return Choice(AS_CAPTURED, kind.why, dict.fromkeys(inputs, FULL))
        if kind.cls is OpClass.PROMOTE:
            return Choice(FULL, listed, dict.fromkeys(moved, FULL))
        return self._free(node, kind, moved)

    def _free(self, node: Node, kind: Classification, moved: list[Node]) -> Choice:
        counted = without_scalars(moved)
        low = [n for n in counted if n in self.low]
        tainted = [n for n in counted if n in self.tainted]
        if kind.dtype is not None:
            return Choice(FULL, "the call asks for this dtype")
        if not counted:
            return Choice(AS_CAPTURED, "no fp32 operand")
        given = operands(node, kind)
        inputs = [*given.moved, *given.promoted, *given.beside]
        if len(low) == len(counted):
            if kind.cls is OpClass.FP32_INSIDE and self._returns_fp32(node, kind):
                return Choice(FULL, f"{kind.why}; no low operation reads it: returns full precision", asks_dtype=True)
        if self.may_round(node, kind, counted):
            return self._set_low(node, kind, inputs, kind.why)
        if len(low) == len(counted):
            # A low stream ends in this sum: upcasting one operand costs as much as upcasting the sum.
            adds = self.fast and kind.mixed and set(kind.names) <= ADDITIONS
            if adds and self._only_full_readers(node):
                why = "accuracy=fast: last sum of a low-precision stream, unrounded"
                return Choice(FULL, why, dict.fromkeys(counted[:1], FULL))
            if kind.cls is OpClass.FP32_INSIDE and self._must_return_full(node, kind):
                why = f"{kind.why}; a full-precision reader wants the result unrounded"
                return Choice(FULL, why, dict.fromkeys(inputs, FULL))
            return self._set_low(node, kind, inputs, f"{kind.why}; every operand is low precision")
        if node in self.ahead.early:
            return self._set_low(node, kind, inputs, "every reader takes low precision: cast once, before it")
        if self.fast and node not in self.kept and node in self.ahead.low:
            reason = self._fast_reason(node, kind, low, tainted, counted)
            if reason and low and kind.mixed and set(kind.names) <= ADDITIONS:
                self.low.add(node)  # the sum is rounded for its readers; rounding the operand too would round twice
                return Choice(FULL, reason + ", rounded after the sum")
            if reason:
                return self._set_low(node, kind, inputs, reason)
        if tainted and kind.cls is not OpClass.FP32_INSIDE:
            self.tainted.add(node)
        if low:
            reason = "mixed operands promote to full precision" + self._why_kept(node)
            return Choice(FULL, reason, {} if kind.mixed else dict.fromkeys(moved, FULL))
        return Choice(FULL, "operands are full precision" + self._why_kept(node))

    def _kept(self) -> dict[Node, str]:
        """Return the nodes that what reads them keeps in full precision, each with the name of that reader."""
        autocast = RuleBasedPlan(replace(self.problem, accuracy="autocast"))
        autocast.run()
        unmeasured = dict.fromkeys(self.problem.unbounded, "a reader without a measured gradient")
        return {**unmeasured, **kept_as_in_autocast(self.problem, autocast.low)}

    def _why_kept(self, node: Node) -> str:
        return f", and {self.kept[node]} would magnify a rounding" if node in self.kept else ""

    def may_round(self, node: Node, kind: Classification, read: Sequence[Node]) -> bool:
        """Say whether an error budget may make a free operation low by casting its operands.

        It may not before what magnifies a rounding. It may not cast a whole input or parameter for a view of it or a
        gather from it.
        """
        if isinstance(self.problem.accuracy, str) or not has_eligible(node):
            return False
        if node in self.kept:
            return False
        moves = kind.cls is OpClass.NEUTRAL or not GATHERS.isdisjoint(kind.names)
        return not moves or len(read) != 1 or not is_leaf(read[0])

    def _fast_reason(
        self, node: Node, kind: Classification, low: list[Node], tainted: list[Node], counted: list[Node]
    ) -> str:
        """Return why a free operation is low under accuracy "fast", or "" if it stays full."""
        if kind.cls is OpClass.FP32_INSIDE:  # a cast after it costs as much as one before it
            return ""
        if low and (not tainted or set(kind.names) <= ADDITIONS):
            return "accuracy=fast: joins a low-precision stream that feeds low-precision operations"
        if self.problem.memory.is_written(node):  # a cast before it would break an alias
            return ""
        if not low and not tainted and len(counted) == 1 and not is_leaf(counted[0]):
            return "accuracy=fast: feeds low-precision operations"
        return ""

    def _returns_fp32(self, node: Node, kind: Classification) -> bool:
        """Say whether a reduction of a low value should return full precision by its ``dtype`` argument.

        If no reader is low, this rounds less and needs no cast. A reproduction of PyTorch's own policy must not do so.
        """
        ours = self.problem.lists.unlisted == "opaque"
        return ours and kind.takes_dtype and len(node.all_input_nodes) == 1 and self._only_full_readers(node)

    def _only_full_readers(self, node: Node) -> bool:
        """Say whether everything that reads ``node`` takes full precision."""
        return bool(node.users) and all(self._takes_full(user, node) for user in node.users)

    def _takes_full(self, user: Node, node: Node) -> bool:
        kind = self.classes.get(user)
        restored = user.op == "output" and self.problem.keep_outputs
        return restored or (kind is not None and kind.cls in (OpClass.DENY, OpClass.OPAQUE))

    def _must_return_full(self, node: Node, kind: Classification) -> bool:
        """Say whether rounding the result would lose accuracy that autocast keeps.

        On CUDA autocast returns fp32 from softmax and most norms; returning low precision is rounding-equal only
        if every reader rounds the result anyway. CPU autocast returns low precision itself. Accuracy "fast" needs full
        precision only from the last norm, which no low operation follows (one cast before it instead of after it).
        """
        if self.fast and node not in self.kept:
            return kind.partial and node not in self.ahead.low
        return kind.full_in_autocast and not all(self.ahead.takes_low(user, node) for user in node.users)

    def _conversion(self, node: Node, kind: Classification, moved: list[Node]) -> Choice:
        if kind.dtype is None and moved and all(n in self.low for n in moved):
            return self._set_low(node, kind, [], f"{kind.why} (to a low-precision value's dtype)")
        return Choice(FULL if is_eligible(captured(node)) else AS_CAPTURED, kind.why)

    def follow(self, node: Node, kind: Classification, precision: str) -> Choice:
        """Return the choice of a node that writes to, or aliases, memory in ``precision``, which is never cast."""
        inputs = [n for n in node.all_input_nodes if is_eligible(captured(n))]
        if kind.written & set(inputs):
            sources = [n for n in inputs if n not in kind.written and n in kind.applies]
            reason = f"writes to a {precision}-precision value, which is never cast"
            return Choice(precision, reason, {} if kind.mixed else dict.fromkeys(sources, precision))
        source = self.ahead.shown[node]
        others = [n for n in inputs if n is not source and not (kind.mixed and kind.cls in FREE)]
        if kind.cls is OpClass.NEUTRAL:
            others = [n for n in others if n in kind.applies]  # of any further operand only the shape is read
        reason = f"aliases {source.name}, which is written later, and takes its {precision} precision"
        return Choice(precision, reason, dict.fromkeys(others, precision if kind.cls in FREE else FULL))

    def _set_low(self, node: Node, kind: Classification, inputs: list[Node], reason: str) -> Choice:
        wants = {n: LOW if n in kind.applies else FULL for n in inputs}
        shared = self.problem.memory.storages.get(node, frozenset()) & self.ahead.full
        if shared and not isinstance(captured(node), torch.Tensor):
            why = f"{reason}; but one of its results is written in full precision"
            return Choice(FULL, why, dict.fromkeys(inputs, FULL))
        if shared:
            return Choice(LOW, reason + "; the result is written in full precision", wants, converts_result=True)
        if has_eligible(node):
            self.low.add(node)
        return Choice(LOW, reason, wants)


def _is_like(kind: Classification) -> bool:
    """Say whether a call makes a new tensor with the dtype of another (``randn_like``, ``new_zeros``)."""
    return all(name.endswith("_like") or name.startswith("aten.new_") for name in kind.names)


def without_scalars(nodes: Sequence[Node]) -> list[Node]:
    """Drop zero-dimensional operands, which do not take part in promotion beside larger ones."""
    large = [n for n in nodes if isinstance(value(n), torch.Tensor) and value(n).dim() > 0]
    return large or list(nodes)

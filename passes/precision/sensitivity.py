"""How much of the loss goes through each reading of a value: by rule, where no gradient was measured.

Before: a classified graph. After: ``influence.readings[add, linear_1] == 0.5``: what ``linear_1`` reads of ``add``.

Roundings are taken as independent and relative, so that their variances add, each by its influence (N. Higham and
T. Mary, SIAM J. Sci. Comput. 41(5), 2019). What all of a low dtype's roundings have in common, its epsilon, is left
out: plans are compared with plans in the same dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import has_eligible
from amp_graph.passes.graph.identify_ops import is_part
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.rule_based_planner import ADDITIONS


@dataclass(frozen=True)
class Influence:
    """What a rounding does: of a value for one of its readers (``readings``), or for all that read it (``values``).

    In units of its own; ``origin`` says where it is from: "by rule", or "measured".
    """

    readings: Mapping[tuple[Node, Node], float]
    values: Mapping[Node, float]
    origin: str = "by rule"


def influence_by_rule(problem: Problem, unused: Collection[Node] = ()) -> Influence:
    """Return the influence of each reading, as the part of all that reaches the outputs, but for ``unused`` ones.

    An output has 1. An operation hands its influence down to its operands: a sum by their sizes (squared, where a
    product or a norm makes 1 and a sum adds up), any other one evenly; parameters and inputs get what the other
    operands get. So a value on a residual branch has its branch's part, and the stream it goes into has it all.
    """
    sizes = _sizes(problem)
    found: dict[tuple[Node, Node], float] = {}
    total: dict[Node, float] = {}
    for node in reversed(problem.gm.graph.nodes):
        total[node] = 1.0 if node.op == "output" else sum_of_readings(node, found, problem)
        given = [n for n in node.all_input_nodes if has_eligible(n)]
        for source, share in zip(given, _shares(node, given, problem.classes.get(node), sizes), strict=True):
            found[source, node] = 0.0 if node.op == "output" and source in unused else share * total[node]
    return Influence(found, total)


def sum_of_readings(node: Node, readings: Mapping[tuple[Node, Node], float], problem: Problem) -> float:
    """Return the influence of a value: that of all its readings.

    A value that is written in place is read wherever its memory is read afterwards, by whichever name is read most.
    """
    memory = problem.memory
    if not memory.is_written(node):
        return sum(readings.get((node, user), 0.0) for user in node.users)
    at = memory.order[node]
    same = [n for n in memory.order if memory.storages[n] & memory.storages[node]]
    return max(sum(readings.get((n, u), 0.0) for u in n.users if memory.order[u] > at) for n in same)


def _shares(node: Node, given: list[Node], kind: Classification | None, sizes: Mapping[Node, float]) -> list[float]:
    """Return which part of the influence of ``node`` each of its operands has."""
    if node.op == "output":
        return [1.0] * len(given)
    if _is_sum(kind) and len(given) > 1:
        return [sizes[source] / sizes[node] for source in given]
    inner = sum(source.op not in ("placeholder", "get_attr") for source in given)
    return [1.0 / max(1, inner)] * len(given)


def _sizes(problem: Problem) -> dict[Node, float]:
    """Return the mean square of each value's elements, in those of a product's result."""
    sizes: dict[Node, float] = {}
    for node in problem.gm.graph.nodes:
        kind = problem.classes.get(node)
        given = [n for n in node.all_input_nodes if has_eligible(n)]
        moves = is_part(node) or (kind is not None and kind.cls in (OpClass.FOLLOW, OpClass.NEUTRAL))
        if _is_sum(kind) and given:
            sizes[node] = sum(sizes[n] for n in given)
        else:
            sizes[node] = max((sizes[n] for n in given), default=1.0) if moves else 1.0
    return sizes


def _is_sum(kind: Classification | None) -> bool:
    return kind is not None and bool(kind.names) and set(kind.names) <= ADDITIONS

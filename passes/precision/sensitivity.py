"""Estimate by rule how sensitive the loss is to each read of a value, for graphs without measured gradients.

Before: a classified graph. After: ``influence.readings[add, linear_1] == 0.5``, for ``linear_1`` reading ``add``.

Roundings are assumed independent and relative, so their variances add, weighted by influence (N. Higham and T. Mary,
SIAM J. Sci. Comput. 41(5), 2019). The epsilon of the low dtype is left out, as only plans of one dtype are compared.
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
    """The effect of rounding a value for one of its readers (``readings``), or for all of them (``values``).

    The unit is arbitrary. ``origin``: "by rule" or "measured". ``unmeasured``: nodes for which some rounding has no
    measured effect, as no gradient reaches it.
    """

    readings: Mapping[tuple[Node, Node], float]
    values: Mapping[Node, float]
    origin: str = "by rule"
    unmeasured: frozenset[Node] = frozenset()


def influence_by_rule(problem: Problem, unused: Collection[Node] = ()) -> Influence:
    """Return the influence of each read: its share of the outputs, ``unused`` ones excepted.

    An output has influence 1. An operation passes its influence on to its operands: a sum in proportion to their mean
    squares (a matmul or norm makes 1, a sum adds up), any other operation evenly. Parameters and inputs get as much as
    each other operand. So a value on a residual branch has the share of its branch, the residual stream all of it.
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
    """Return the influence of a value: the sum over its reads.

    A value that is written in place counts all later reads of its memory, by the alias with the largest sum.
    """
    memory = problem.memory
    if not memory.is_written(node):
        return sum(readings.get((node, user), 0.0) for user in node.users)
    at = memory.order[node]
    same = [n for n in memory.order if memory.storages[n] & memory.storages[node]]
    return max(sum(readings.get((n, u), 0.0) for u in n.users if memory.order[u] > at) for n in same)


def _shares(node: Node, given: list[Node], kind: Classification | None, sizes: Mapping[Node, float]) -> list[float]:
    """Return the share of the influence of ``node`` that each of its operands gets."""
    if node.op == "output":
        return [1.0] * len(given)
    if _is_sum(kind) and len(given) > 1:
        return [sizes[source] / sizes[node] for source in given]
    inner = sum(source.op not in ("placeholder", "get_attr") for source in given)
    return [1.0 / max(1, inner)] * len(given)


def _sizes(problem: Problem) -> dict[Node, float]:
    """Return the estimated mean square of each value's elements; that of a matmul's result is the unit."""
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

"""The optimal planner: finds the plan of least cost that the accuracy permits, by a minimum cut.

Before: a gelu between two matmuls. After: low, "every operand is low precision; at the least predicted time".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.precision.build_assignment import Formulation
from amp_graph.passes.precision.planning_problem import FULL, LOW, Choice
from amp_graph.passes.precision.precision_assignment import cheapest
from amp_graph.passes.precision.rule_based_planner import Operands, operands

BY_TIME = "at the least predicted time"


def mincut(made: Formulation, skip: bool = False) -> dict[Node, Choice]:
    """Choose a precision for every classified node of a problem, at the least cost on its machine.

    ``skip``: leave an ``allow`` operation in full precision where its casts cost more than it gains.
    """
    return choices(made, cheapest(made.task(skip)))


def choices(made: Formulation, low: frozenset[int]) -> dict[Node, Choice]:
    """Return the choices, with reasons, of the assignment in which the variables in ``low`` are low."""
    limits = {i: other for i, other in made.limits if other not in low}
    return {node: _choice(node, made, low, limits) for node in made.of}


def _choice(node: Node, made: Formulation, low: frozenset[int], limits: Mapping[int, int]) -> Choice:
    """Return the choice for ``node``; ``limits``: of each variable that may not be low, one that keeps it full."""
    kind, painted, i = made.problem.classes[node], made.painted[node], made.of[node]
    if not made.is_free(node):
        chosen = LOW if i in low else FULL
        if node not in made.tied or (painted.precision == LOW) == (i in low):
            return painted
        return Choice(chosen, kind.why) if kind.conversion else made.permitted.follow(node, kind, chosen)
    if i in low:
        return painted if kind.cls is OpClass.ALLOW else replace(painted, reason=f"{painted.reason}; {BY_TIME}")
    given = operands(node, kind)
    wants = dict.fromkeys((*given.moved, *given.beside), FULL)
    if given.promoted and all(made.holds[n] in low for n in given.promoted):
        wants[given.promoted[0]] = FULL  # the kernel promotes the others
    if i in limits:
        reads = any(made.of.get(user) == limits[i] for user in node.users)
        return Choice(FULL, "a reader takes full precision" if reads else "what it reads is full precision", wants)
    return Choice(FULL, _why_full(given, made, low), wants)


def _why_full(given: Operands, made: Formulation, low: frozenset[int]) -> str:
    if not isinstance(made.problem.accuracy, str):
        return f"full precision in the fastest plan within the error budget; {BY_TIME}"
    casts = sum(made.holds[n] not in low for n in (*given.moved, *given.promoted))
    return f"not profitable: low precision with {casts} casts of operands would take longer"

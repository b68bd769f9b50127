"""Turn the harm of roundings into numbers: one per variable of a planning problem, as for its costs.

Before: a formulated problem, and the influence of each read. After: a ``Task`` whose costs are harms.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.precision.build_assignment import Formulation
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.planning_problem import LOW
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, Cast, Task
from amp_graph.passes.precision.rule_based_planner import GATHERS
from amp_graph.passes.precision.sensitivity import Influence
from amp_graph.passes.torch_compat.fake import numel

WHOLE = 10**12  # the harm of all roundings together, in whole numbers


def harm_of(made: Formulation, influence: Influence) -> Task:
    """Return the task in which a rounding costs its influence, with the variables and limits of ``made``.

    A low operation rounds its result once for all its readers; a neutral operation does not round. A low gather
    copies exactly, but its backward sums the gradients of each element and rounds each sum. A full value that is cast
    is rounded for each low reader, by the influence of that reader.
    """
    unit = WHOLE / (sum(influence.readings.values()) or 1.0)
    low = [0] * len(made.full)
    for node, i in made.of.items():
        if made.problem.classes[node].cls is not OpClass.NEUTRAL:
            low[i] = round(unit * influence.values.get(node, 0.0) * _roundings(node, made.problem.classes[node]))
    casts = [
        Cast(made.holds[source], (reader,), (), round(unit * influence.readings.get((source, node), 0.0)), 0)
        for source, node, reader in _lowered(made)
    ]
    return Task((0,) * len(low), tuple(low), made.fixed, tuple(made.limits), tuple(casts))


def _roundings(node: Node, kind: Classification) -> float:
    """Return the number of roundings that one result counts for."""
    if GATHERS.isdisjoint(kind.names):
        return 1.0
    given = max((numel(t) for n in node.all_input_nodes if n in kind.applies for t in _floats(n)), default=1)
    return max(1.0, sum(map(numel, _floats(node))) / max(1, given))


def _floats(node: Node) -> list[torch.Tensor]:
    return [t for t in tensors(captured(node)) if t.is_floating_point()]


def _lowered(made: Formulation) -> list[tuple[Node, Node, int]]:
    """Return each operand that may be downcast: the value, its reader, and the variable that decides it."""
    found = []
    for node, i in made.of.items():
        for source in node.all_input_nodes:
            if i in made.lowers.get(source, ()):
                found.append((source, node, i))
            elif _is_painted_low(made, node, source):
                found.append((source, node, LOW_ALWAYS))
    return found


def _is_painted_low(made: Formulation, node: Node, source: Node) -> bool:
    decided = node not in made.tied and not made.is_free(node)
    return decided and made.painted[node].wants.get(source) == LOW

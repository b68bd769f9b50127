"""Planner for an error budget: finds the fastest plan whose predicted error is within a multiple of autocast's.

Before: a planning problem and 1.5. After: a precision for every operation, and ``Budget(1.5, error=1.47, ...)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from amp_graph.lists import OpClass
from amp_graph.passes.graph.fake_values import captured, tensors
from amp_graph.passes.graph.meta_keys import REGION
from amp_graph.passes.graph.node_info import HALVES
from amp_graph.passes.precision.build_assignment import Formulation, formulate, low_of
from amp_graph.passes.precision.classify import Classification
from amp_graph.passes.precision.convex_hull import Point, Tradeoff
from amp_graph.passes.precision.machine_rates import Machine
from amp_graph.passes.precision.op_cost import floats
from amp_graph.passes.precision.planning_problem import LOW, Problem
from amp_graph.passes.precision.precision_assignment import FULL_ALWAYS, LOW_ALWAYS, Task, Term, cheapest
from amp_graph.passes.precision.rule_based_planner import GATHERS, paint
from amp_graph.passes.precision.sensitivity import Influence, influence_by_rule
from amp_graph.passes.torch_compat.fake import numel

WHOLE = 10**12  # the harm of all roundings together, in whole numbers


def harm_of(made: Formulation, influence: Influence) -> Task:
    """Return the task in which a rounding costs its influence, with the variables and limits of ``made``.

    A low operation rounds its result once for all its readers; a neutral operation does not round. A low gather
    copies exactly, but its backward sums the gradients of each element and rounds each sum. A full value that is cast
    is rounded for each low reader, by the influence of that reader. What the model's own autocast regions lower is
    rounded in every plan; its own casts are no error, as it makes them in fp32 too.
    """
    unit = WHOLE / (sum(influence.readings.values()) or 1.0)
    low = [0] * len(made.full)
    for node, i in made.of.items():
        if made.problem.classes[node].cls is not OpClass.NEUTRAL:
            low[i] = round(unit * influence.values.get(node, 0.0) * _roundings(node, made.problem.classes[node]))
    casts = [
        Term((reader,), (made.holds[source],), round(unit * influence.readings.get((source, node), 0.0)))
        for source, node, reader in _lowered(made)
    ]
    by_region = [node for node in made.problem.classes if REGION in node.meta]
    halves = [node for node in by_region if any(t.dtype in HALVES for t in tensors(captured(node)))]
    own = [(source, node) for node in halves for source in node.all_input_nodes]
    always = sum(round(unit * influence.readings.get(pair, 0.0)) for pair in own)
    casts.append(Term((LOW_ALWAYS,), (FULL_ALWAYS,), always))
    return Task((0,) * len(low), tuple(low), made.fixed, tuple(made.limits), tuple(casts))


def _roundings(node: Node, kind: Classification) -> float:
    """Return the number of roundings that one result counts for."""
    if GATHERS.isdisjoint(kind.names):
        return 1.0
    given = max((numel(t) for n in node.all_input_nodes if n in kind.applies for t in floats(n)), default=1)
    return max(1.0, sum(map(numel, floats(node))) / max(1, given))


def _lowered(made: Formulation) -> list[tuple[Node, Node, int]]:
    """Return each operand that may be downcast: the value, its reader, and the variable that decides it."""
    found = []
    for node, i in made.of.items():
        decided = node not in made.tied and not made.is_free(node)
        for source in node.all_input_nodes:
            if i in made.lowers.get(source, ()):
                found.append((source, node, i))
            elif decided and made.painted[node].wants.get(source) == LOW:
                found.append((source, node, LOW_ALWAYS))
    return found


@dataclass(frozen=True)
class Budget:
    """The error that was allowed, and the predicted error and time of a plan.

    ``multiple``: the allowed error; the unit is the predicted error of the plan of accuracy "autocast". ``error``: the
    plan's predicted error in this unit. ``picoseconds``: the plan's time on the machine planned for; ``of_autocast``:
    the time of that other plan. ``origin``: how the influence of roundings was found. Only "measured" makes the
    prediction one of the outputs' error: a rule does not know the sizes of values, and a result of one number
    (``ONE_NUMBER``) has a single error, which may be any draw of that size. ``unmeasured``: how many operations have no
    measured influence.
    """

    multiple: float
    error: float
    picoseconds: int
    of_autocast: int
    origin: str
    unmeasured: int = 0


class ErrorBudget:
    """All plans for one problem, with their cost on ``machine`` and their predicted error.

    The error is the square root of the summed harm of all roundings, relative to the plan of accuracy "autocast". Any
    free operation may be low and any matmul full, whatever "autocast" and "fast" permit; ``deny`` operations stay
    full, and so does what ``conditioning`` keeps. A plan of error 1 or less makes no rounding that "autocast" does not
    make: it is as exact, whatever the prediction is worth. Exactness: approximate (a first-order prediction for
    independent roundings).
    """

    def __init__(self, problem: Problem, machine: Machine, dtype: str, influence: Influence | None = None) -> None:
        self.influence = influence or influence_by_rule(problem)
        self.problem = replace(problem, accuracy=1.0, unbounded=self.influence.unmeasured)
        self.machine, self.dtype = machine, dtype
        self.made = formulate(self.problem, machine, dtype)
        self.plans = Tradeoff(self.made.task(), harm_of(self.made, self.influence))
        self.autocast = self.painted("autocast")

    @cached_property
    def known(self) -> tuple[Point, ...]:
        """The plans of the named accuracies, from the rule-based planner and by minimum cut."""
        named = ("autocast", "fast")
        return (*map(self.painted, named), *map(self.cut, named))

    def painted(self, accuracy: str) -> Point:
        """Return the rule-based plan for a named accuracy."""
        return self.plans.point(low_of(paint(replace(self.problem, accuracy=accuracy)), self.made))

    def cut(self, accuracy: str, skip: bool = False) -> Point:
        """Return the plan of least cost for a named accuracy; ``skip`` as in ``mincut``."""
        named = replace(self.problem, accuracy=accuracy)
        return self.plans.point(cheapest(formulate(named, self.machine, self.dtype).task(skip)))

    def within(self, multiple: float) -> Point:
        """Return the fastest plan found with error up to ``multiple``, or the safest plan if there is none.

        Searches the lower convex hull of time and squared error, and the plans of accuracy "autocast" and "fast". A
        faster plan above the hull may exist. A larger multiple never gives a slower plan.
        """
        bound = math.floor(multiple * multiple * self.autocast.harm)
        exact = self._as_exact.within(bound)
        exact = self.plans.point(exact.low)
        return exact if multiple <= 1 else self.plans.within(bound, (exact, *self.known))

    @cached_property
    def _as_exact(self) -> Tradeoff:
        """The plans whose roundings are among those of accuracy "autocast"."""
        made = formulate(replace(self.problem, accuracy="autocast"), self.machine, self.dtype)
        return Tradeoff(made.task(), harm_of(made, self.influence))

    def error(self, plan: Point) -> float:
        """Return the predicted error of a plan as a multiple of that of accuracy "autocast"."""
        if plan.harm == 0:
            return 0.0
        return math.sqrt(plan.harm / self.autocast.harm) if self.autocast.harm else math.inf

    def variance(self, plan: Point) -> float:
        """Return a plan's harm in the unit of the influences: comparable between graphs if both were measured."""
        return plan.harm * sum(self.influence.readings.values()) / WHOLE

    def budget(self, multiple: float, plan: Point) -> Budget:
        """Summarize a plan."""
        unmeasured = len(self.influence.unmeasured)
        return Budget(multiple, self.error(plan), plan.cost, self.autocast.cost, self.influence.origin, unmeasured)

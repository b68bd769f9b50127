"""Predicts the time, error, casts and number of low-precision operations of plans for a model's graphs.

Before: sampled graphs and a policy. After: ``Figures(picoseconds=2.1e9, error=1.32, low=88, full=14, casts=31)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from amp_graph.capture.sensitivity_sample import Sampled
from amp_graph.errors import PolicyError
from amp_graph.passes.precision.convex_hull import Point
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.machine_rates import Machine, machine_for
from amp_graph.passes.precision.planning_problem import AS_CAPTURED
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS
from amp_graph.passes.precision.predict_time import prediction
from amp_graph.policy import Policy


@dataclass(frozen=True)
class Figures:
    """One plan for all graphs: its time, its error as a multiple of accuracy "autocast"'s, and its counts.

    ``points`` are its assignments, one per graph: equal ones are the same plan.
    """

    picoseconds: int
    error: float
    low: int
    full: int
    casts: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plans:
    """All plans for the graphs of one sample call, under one policy's lists."""

    policy: Policy
    machine: Machine
    graphs: tuple[ErrorBudget, ...]

    def figures(self, policy: Policy) -> Figures:
        """Return the figures of the plan of ``policy``, which may differ in accuracy and planner only."""
        return self._of(tuple(_point(graph, policy) for graph in self.graphs))

    def in_full(self) -> Figures:
        """Return the figures of the most exact plan: full precision, except what the user forces low."""
        return self._of(tuple(graph.plans.safest() for graph in self.graphs))

    def _of(self, points: tuple[Point, ...]) -> Figures:
        pairs = list(zip(self.graphs, points, strict=True))
        harm = sum(graph.variance(point) for graph, point in pairs)
        of_autocast = sum(graph.variance(graph.autocast) for graph in self.graphs)
        error = math.sqrt(harm / of_autocast) if of_autocast else math.inf if harm else 0.0
        low = sum(count_low(graph, point) for graph, point in pairs)
        return Figures(
            sum(point.cost for point in points),
            error,
            low,
            sum(map(_planned, self.graphs)) - low,
            sum(count_casts(graph, point) for graph, point in pairs),
            points,
        )


def plans_for(sampled: Sequence[Sampled], policy: Policy, device: str) -> Plans:
    """Return the plans for sampled graphs; PolicyError for lists that reproduce torch.autocast."""
    if policy.op_list(device).unlisted != "opaque":
        raise PolicyError(
            "plan: lists that reproduce torch.autocast choose per operation, without predicting time or error\n"
            f"  legal: the default lists, or others over them\n  fix:   --policy {policy.dtype}"
        )
    machine = machine_for(policy.device or device)
    dtype = str(policy.torch_dtype(device)).removeprefix("torch.")
    graphs = [ErrorBudget(one.problem, machine, dtype, one.measured.of(one.problem)) for one in sampled]
    return Plans(policy, machine, tuple(graphs))


def _point(graph: ErrorBudget, policy: Policy) -> Point:
    accuracy = str(policy.accuracy)
    if policy.budget is not None:
        found = graph.within(policy.budget)
    elif policy.planner == "paint":
        found = graph.painted(accuracy)
    else:
        found = graph.cut(accuracy, policy.leaves == "true")
    left = policy.leaves == "graphs" and not prediction(graph.made, graph.plans.costs, found.low).is_worth_it
    return graph.plans.point({LOW_ALWAYS}) if left else found


def _planned(graph: ErrorBudget) -> int:
    return sum(choice.precision != AS_CAPTURED for choice in graph.made.painted.values())


def count_low(graph: ErrorBudget, plan: Point) -> int:
    """Return the number of low-precision operations of a plan."""
    made = graph.made
    return sum(i in plan.low for n, i in made.of.items() if made.painted[n].precision != AS_CAPTURED)


def count_casts(graph: ErrorBudget, plan: Point) -> int:
    """Return the number of casts of a plan: one per cast value, and one per full operation with low operands only."""
    made, low = graph.made, plan.low
    count = sum(cast.is_made(low) for _, cast in made.casts())
    promoting = {
        given.promoted[0]
        for node, i in made.of.items()
        if i not in low and made.is_free(node) and (given := made.operands(node)).promoted
        if all(made.holds[n] in low for n in given.promoted)
    }
    return count + len(promoting)

"""Predict the time of a plan on a machine, and the time of the same graph in full precision.

Before: ``f32 -> cast -> linear(bf16) -> cast -> f32``. After: ``Prediction(planned=28e6, full=20e6)``: the casts cost
more than they gain, so the graph should stay in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from amp_graph.passes.graph.fake_values import has_eligible
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.precision.build_assignment import Formulation, low_of
from amp_graph.passes.precision.op_cost import PICOSECONDS
from amp_graph.passes.precision.planning_problem import AS_CAPTURED, FULL, LOW, Choice, Problem
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, cost, is_legal
from amp_graph.passes.precision.rule_based_planner import paint

TIMES_IN_BACKWARD = 2  # overhead of a graph's call in backward, as a multiple of that in forward
# A graph stays in full precision if its predicted speed is a smaller multiple of full precision's. For small graphs
# the predicted speed is 1 to 1.7 times the measured one (benchmarks/predictions.py).
WORTH_IT = 1 / 0.85


@dataclass(frozen=True)
class Prediction:
    """The time of a plan, graph call included, and the time of the graph in full precision, in picoseconds.

    ``is_low``: whether any operation is low. ``may_be_full``: whether all of them may be full; False if the user wants
    some in low precision, or if inputs are low. ``machine``: the machine that the prediction is for. ``autocast``: the
    time of the rule-based plan of accuracy "autocast".
    """

    planned: int
    full: int
    is_low: bool
    may_be_full: bool
    machine: str
    autocast: int

    @property
    def speed(self) -> float:
        """The plan's speed as a multiple of that of full precision: above 1 is faster."""
        return (self.full or 1) / (self.planned or 1)

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan is predicted to be faster by a safe margin."""
        return not self.is_low or not self.may_be_full or self.speed >= WORTH_IT


def predicted(made: Formulation, low: frozenset[int]) -> Prediction:
    """Return the predicted time of the plan whose low variables are ``low``."""
    problem, task, full = made.problem, made.task(), frozenset({LOW_ALWAYS})
    by_rules = made.painted if problem.accuracy == "autocast" else paint(replace(problem, accuracy="autocast"))
    calls = 1 + TIMES_IN_BACKWARD * any(map(is_trained, made.of))
    planned = cost(task, low) + round(PICOSECONDS * made.machine.graph * calls)
    is_low = any(i in low and made.painted[node].precision == LOW for node, i in made.of.items())
    of_rules = cost(task, low_of(by_rules, made))
    return Prediction(planned, cost(task, full), is_low, is_legal(task, full), made.machine.name, of_rules)


def left_alone(problem: Problem, found: Prediction, dtype: str) -> dict[Node, Choice]:
    """Return the all-full plan, for a graph in which low precision is not profitable."""
    speed = f"{found.speed:.2f} times fp32's speed on {found.machine}"
    why = f"not profitable: with {dtype} the graph is predicted to have {speed}; the least is {WORTH_IT:.2f}"
    return {
        node: Choice(FULL, why) if has_eligible(node) else Choice(AS_CAPTURED, "carries no fp32 value")
        for node in problem.classes
    }

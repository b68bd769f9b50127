"""What a plan is predicted to take on a machine, and the same graph in full precision.

Before: ``f32 -> cast -> linear(bf16) -> cast -> f32``. After: ``Prediction(planned=28e6, full=20e6)``: the casts cost
more than they gain, and the graph is better left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from amp_graph.passes.graph.fake_values import has_eligible
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.precision.build_assignment import Formulation, formulate, low_of
from amp_graph.passes.precision.machine_rates import Machine
from amp_graph.passes.precision.op_cost import PICOSECONDS
from amp_graph.passes.precision.planning_problem import AS_CAPTURED, FULL, LOW, Choice, Problem
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, Task, cost, is_legal

# Keys of a graph's meta: the Prediction for its plan; and that for one that was not worth it, where it is left alone.
TIMES_IN_BACKWARD = 2  # what the call of a graph costs there, of what it does in forward
# Of the time in full precision: for more a graph is left alone. What is predicted of small graphs is 0.6 to 1 of what
# is measured (benchmarks/predictions.py).
WORTH_IT = 0.85


@dataclass(frozen=True)
class Prediction:
    """What a plan takes, with the call of its graph, and what the graph takes in full precision, in picoseconds.

    ``is_low``: whether anything is low in it. ``may_be_full``: whether all of it may be full; not where the model's
    owner wants a part low, or values arrive so. ``machine``: for which it was counted.
    """

    planned: int
    full: int
    is_low: bool
    may_be_full: bool
    machine: str

    @property
    def ratio(self) -> float:
        """The plan's time over that in full precision."""
        return self.planned / (self.full or 1)

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan is predicted to be faster, by so much that it is."""
        return not self.is_low or not self.may_be_full or self.ratio <= WORTH_IT


def predicted(problem: Problem, chosen: Mapping[Node, Choice], machine: Machine, dtype: str) -> Prediction:
    """Return what the plan ``chosen`` for ``problem`` is predicted to take on ``machine``."""
    made = formulate(problem, machine, dtype, skip=True)
    return prediction(made, made.task(), low_of(chosen, made))


def prediction(made: Formulation, task: Task, low: frozenset[int]) -> Prediction:
    """Return what the plan is predicted to take in which the variables in ``low`` are; ``task``: that of ``made``."""
    full = frozenset({LOW_ALWAYS})
    calls = 1 + TIMES_IN_BACKWARD * any(map(is_trained, made.of))
    planned = cost(task, low) + round(PICOSECONDS * made.machine.graph * calls)
    is_low = any(i in low and made.painted[node].precision == LOW for node, i in made.of.items())
    return Prediction(planned, cost(task, full), is_low, is_legal(task, full), made.machine.name)


def left_alone(problem: Problem, found: Prediction, machine: Machine, dtype: str) -> dict[Node, Choice]:
    """Return the plan in which nothing is low, since that is not worth it."""
    time = f"{found.ratio:.2f} of full precision's time on {machine.name}"
    why = f"not worth it: with {dtype} the graph is predicted to take {time}, and up to {WORTH_IT} would pay"
    return {
        node: Choice(FULL, why) if has_eligible(node) else Choice(AS_CAPTURED, "carries no fp32 value")
        for node in problem.classes
    }

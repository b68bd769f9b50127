"""``amp-graph plan``: the predicted speed and error of a policy's plan; with ``--sweep``, measured as well.

Before: ``--policy bf16,accuracy=1.5``. After: its time, error and casts beside those of autocast, fast and fp32; or
a row for each error budget.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch

from amp_graph.capture.sensitivity_sample import Sampled
from amp_graph.cli.benchmark_policies import ROUNDS, Loss, train
from amp_graph.cli.capture_target import sampled
from amp_graph.cli.main import BUDGETS
from amp_graph.cli.terminal import write_json, write_table
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError, PolicyError
from amp_graph.passes.precision.convex_hull import Point
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.machine_rates import Machine, machine_for
from amp_graph.passes.precision.planning_problem import AS_CAPTURED
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS
from amp_graph.passes.precision.predict_time import prediction
from amp_graph.policy import Policy

Row = dict[str, Any]  # of the table, as --json prints it
MEASURED = ("speed", "gradient_error", "worst_parameter")  # what a row of --sweep has besides
COLUMNS = ("plan", "predicted us", "speed to autocast", "predicted error", "low", "full", "casts")
SWEPT = (
    "budget", "predicted speed", "predicted error", "low", "full", "casts",
    "measured speed", "gradient error", "worst parameter",
)  # fmt: skip
NOTE = """\
All figures are ratios to the plan of accuracy=autocast. Speed, above 1 is faster: forward and backward, median of
{rounds} interleaved rounds. Predicted error: of the outputs. Gradient error: against fp32 on this batch, the median
over parameters, and the largest."""


def run(args: argparse.Namespace) -> int:
    """Sample TARGET, plan it, and print the table."""
    multiples = _multiples(args.sweep) if args.sweep is not None else []
    target, loss, found = sampled(args)
    policy = target.policy
    plans = plans_for(found, policy, device_of_model(target.model) or "cpu")
    machine = plans.machine
    if not args.json:  # before the measurements, which take a while
        graphs = f"{len(found)} graph{'s' * (len(found) > 1)}"
        print(f"{graphs}, {policy}, planned for {machine.name} ({machine.description})")
    rows = list(_swept(plans, multiples, target.model, loss, found) if multiples else _planned_rows(plans))
    if args.json:
        told = {"policy": str(policy), "machine": machine.name, "graphs": len(found), "plans": rows}
        write_json(told, sys.stdout)
        return 0
    base = plans.figures(named(policy, "autocast")).picoseconds / 1e6
    write_table(SWEPT if multiples else COLUMNS, [(_cells(row, base), "") for row in rows], sys.stdout)
    if multiples:
        print(NOTE.format(rounds=ROUNDS))
    return 0


def named(policy: Policy, accuracy: str | float) -> Policy:
    """Return ``policy`` with another accuracy and that accuracy's default planner."""
    return replace(policy, accuracy=accuracy, planner="mincut", skip_unprofitable="false")


def _planned_rows(plans: Plans) -> Iterator[Row]:
    """Yield the policy's plan, and those to compare it with."""
    yield _row(str(plans.policy), plans.figures(plans.policy))
    for word in ("autocast", "fast"):
        yield _row(f"accuracy={word}", plans.figures(named(plans.policy, word)))
    yield _row("full precision", plans.in_full())


def _row(name: str, one: Figures) -> Row:
    """Return a plan's figures; ``error`` is over that of accuracy=autocast."""
    return {
        "plan": name, "predicted_us": one.picoseconds / 1e6, "predicted_error": one.error,
        "low": one.low, "full": one.full, "casts": one.casts,
    }  # fmt: skip


def _cells(row: Row, base: float) -> tuple[str, ...]:
    """Return a row of the table; ``base``: the predicted microseconds of accuracy=autocast."""
    time = row["predicted_us"]
    speed = f"{base / time:.3f}" if time else "-"
    counts = (f"{row['predicted_error']:.3f}", *(str(row[name]) for name in ("low", "full", "casts")))
    measured = [f"{row[name]:.3f}" for name in MEASURED if name in row]
    return (row["plan"], speed, *counts, *measured) if measured else (row["plan"], f"{time:.1f}", speed, *counts)


# -- the curve ----------------------------------------------------------------------------------------


def _multiples(text: str) -> list[float]:
    """Read the budgets to sweep over."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < math.inf for one in found):
        raise AmpGraphError(
            f"plan: --sweep {text!r} is not a list of error budgets\n"
            "  legal: numbers above 0, separated by commas; 1 is the predicted error of torch.autocast's plan\n"
            f"  fix:   --sweep {BUDGETS}"
        )
    return found


def _swept(
    plans: Plans, multiples: list[float], model: torch.nn.Module, loss: Loss, found: list[Sampled]
) -> Iterator[Row]:
    """Yield each plan, autocast's first, with its measured speed, median and largest gradient error over autocast's."""
    policies = {word: named(plans.policy, word) for word in ("autocast", "fast")}
    policies |= {f"{one:g}": named(plans.policy, one) for one in multiples}
    figures = {name: plans.figures(policy) for name, policy in policies.items()}
    first = {one.points: name for name, one in reversed(figures.items())}  # equal plans are measured once
    distinct = list(dict.fromkeys(first[one.points] for one in figures.values()))
    measured = tuple(one.measured for one in found)
    with redirect_stdout(sys.stderr):  # keep the user's prints out of our output
        trained = train(model, loss, [policies[name] for name in distinct], measured, ROUNDS)
    of_plan = dict(zip(distinct, trained, strict=True))
    of_base = of_plan["autocast"]
    for name, one in figures.items():
        told = of_plan[first[one.points]]
        yield _row(name, one) | dict(zip(MEASURED, (told.speed_to(of_base), *told.errors_to(of_base)), strict=True))


# -- the figures of a plan ----------------------------------------------------------------------------


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

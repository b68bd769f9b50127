"""``amp-graph plan``: the predicted speed and error of a policy's plan, beside those of autocast, fast and fp32.

Before: ``--policy bf16,accuracy=1.2``. After: a row for each plan; with ``--sweep``, one for each error budget as well.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from amp_graph.capture.sensitivity_sample import Sampled, measure
from amp_graph.cli.capture_target import loss_or_mixture, plain_target, users_code
from amp_graph.cli.main import BUDGETS
from amp_graph.cli.terminal import Told
from amp_graph.convert import refuse_what_cannot_be_converted, warn_of_unmatched
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError, CaptureError, PolicyError
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.passes.precision.convex_hull import Point
from amp_graph.passes.precision.error_budget_planner import ErrorBudget
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.precision.planning_problem import AS_CAPTURED
from amp_graph.passes.precision.rule_based_planner import operands
from amp_graph.policy import Policy
from amp_graph.search.space import point_of

COLUMNS = ("plan", "predicted us", "speed to autocast", "predicted error", "low", "full", "casts")


def run(args: argparse.Namespace) -> Told:
    """Sample TARGET, plan it, and return the table."""
    accuracies = ["autocast", "fast", *(_multiples(args.sweep) if args.sweep is not None else ())]
    policy, device, found = sampled(args)
    if policy.op_list(device).unlisted != "opaque":
        raise PolicyError(
            "plan: lists that reproduce torch.autocast choose per operation, without predicting time or error\n"
            f"  legal: the default lists, or others over them\n  fix:   --policy {policy.dtype}"
        )
    machine, dtype = machine_for(policy.device or device), str(policy.torch_dtype(device)).removeprefix("torch.")
    graphs = [ErrorBudget(made, machine, dtype, measured.of(made)) for made, measured in found]
    base = replace(policy, planner="mincut", skip_unprofitable="false")
    policies = {str(policy): policy, **{f"accuracy={one}": replace(base, accuracy=one) for one in accuracies}}
    plans = {name: [point_of(graph, one) for graph in graphs] for name, one in policies.items()}
    plans["full precision"] = [graph.plans.safest() for graph in graphs]
    rows = [_row(name, graphs, points) for name, points in plans.items()]
    of_autocast = rows[1]["predicted_us"]
    head = f"{len(found)} graphs, {policy}, planned for {machine.name} ({machine.description})"
    cells = [
        (row["plan"], f"{row['predicted_us']:.1f}", f"{of_autocast / (row['predicted_us'] or math.inf):.3f}",
         f"{row['predicted_error']:.3f}", *(str(row[name]) for name in ("low", "full", "casts")))
        for row in rows
    ]  # fmt: skip
    data = {"policy": str(policy), "machine": machine.name, "graphs": len(found), "plans": rows}
    return Told(data, [head, *aligned([COLUMNS, *cells])])


def sampled(args: argparse.Namespace) -> tuple[Policy, str, list[Sampled]]:
    """Run TARGET once in fp32, forward and backward; return its policy, its device, and the measurements.

    The loss is the model's own if it returns one, else a fixed random mixture of its floating-point outputs.
    """
    with users_code():
        target = plain_target(args)
        refuse_what_cannot_be_converted(target.model, target.policy)
        if target.policy.level != "O1":
            raise PolicyError(
                f"plan: level {target.policy.level} is not supported: plans are for fp32 parameters\n"
                "  legal: level O1\n  fix:   --policy bf16"
            )
        warn_of_unmatched(target.model, target.policy)
        try:
            found = measure(target.model, target.policy, lambda one: loss_or_mixture(target.call(one)))
        except CaptureError as error:
            raise CaptureError(
                f"plan: the loss of {type(target.model).__name__} does not come from a captured graph, or has no "
                "gradient\n  legal: a TARGET whose forward is captured, at least in part, and runs with gradients\n"
                "  fix:   amp-graph dump TARGET shows what is captured"
            ) from error
    return target.policy, device_of_model(target.model) or "cpu", found


def _multiples(text: str) -> list[float]:
    """Read the budgets to sweep over."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < one < math.inf for one in found):
        raise AmpGraphError(
            f"plan: --sweep {text!r} is not a list of error budgets\n"
            "  legal: numbers above 0, separated by commas; 1 is the predicted error of torch.autocast's plan\n"
            f"  fix:   --sweep {BUDGETS}"
        )
    return found


# -- the figures of a plan ----------------------------------------------------------------------------


def _row(name: str, graphs: Sequence[ErrorBudget], points: Sequence[Point]) -> dict[str, Any]:
    """Return the figures of one plan for all graphs; its error is a multiple of accuracy "autocast"'s."""
    pairs = list(zip(graphs, points, strict=True))
    harm = sum(graph.variance(point) for graph, point in pairs)
    of_autocast = sum(graph.variance(graph.autocast) for graph in graphs)
    nodes = [(graph, point, node) for graph, point in pairs for node, choice in graph.made.painted.items()
             if choice.precision != AS_CAPTURED]  # fmt: skip
    low = sum(graph.made.of.get(node) in point.low for graph, point, node in nodes)
    return {
        "plan": name,
        "predicted_us": sum(point.cost for point in points) / 1e6,
        "predicted_error": math.sqrt(harm / of_autocast) if of_autocast else math.inf if harm else 0.0,
        "low": low,
        "full": len(nodes) - low,
        "casts": sum(count_casts(graph, point) for graph, point in pairs),
    }


def count_casts(graph: ErrorBudget, plan: Point) -> int:
    """Return the number of casts of a plan: one per cast value, and one per full operation with low operands only."""
    made, low = graph.made, plan.low
    count = sum(cast.is_due(low) for _, cast in made.casts())
    promoting = {
        given.promoted[0]
        for node, i in made.of.items()
        if i not in low and made.is_free(node) and (given := operands(node, made.problem.classes[node])).promoted
        if all(made.holds[n] in low for n in given.promoted)
    }
    return count + len(promoting)

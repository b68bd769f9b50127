"""Predicts the plans that are worth trying, and which operations make the error of the default one.

One forward and backward in fp32 captures the graphs and measures how much each rounding changes the outputs. Plans are
those that ``convert`` makes of a policy without a sample, so that the text of the policy is all that it takes to make
them again; their errors are predicted by the measured influences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from amp_graph.capture.sensitivity_sample import measure
from amp_graph.devices import device_of_model
from amp_graph.errors import CaptureError
from amp_graph.numerics.compare import projected
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.precision.convex_hull import Point
from amp_graph.passes.precision.error_budget_planner import ErrorBudget, harm_of
from amp_graph.passes.precision.machine_rates import machine_for
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, cost
from amp_graph.policy import Policy
from amp_graph.search.proposals import Space
from amp_graph.search.trials import Candidate

MULTIPLES = (0.5, 0.75, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0)  # those of equal plans once
Step = Callable[[Any], Any]


def space_of(model: torch.nn.Module, step: Step, policy: Policy, *, trains: bool) -> Space:
    """Return what may be tried for ``model``; no plans but the default one if nothing of it is captured."""
    device = device_of_model(model) or "cpu"
    words: list[tuple[str, Any]] = (
        [("skip_unprofitable", "true")] + [("level", "O2")] * trains + [("replay", True)] * (device == "cuda")
    )
    try:
        sampled = measure(model, policy, lambda one: loss_of(step(one)))
    except CaptureError:
        return Space([Candidate(str(policy))], {}, words)
    machine, dtype = machine_for(policy.device or device), str(policy.torch_dtype(device)).removeprefix("torch.")
    graphs = [(ErrorBudget(problem, machine, dtype), measured.of(problem)) for problem, measured in sampled]
    harms = [harm_of(graph.made, graph.influence if found is None else found) for graph, found in graphs]
    full = sum(graph.plans.point({LOW_ALWAYS}).cost for graph, _ in graphs)
    by_rules = [graph.cut("autocast") for graph, _ in graphs]
    unit = sum(cost(harm, graph.autocast.low) for (graph, _), harm in zip(graphs, harms, strict=True))

    def candidate(accuracy: str | float) -> tuple[Candidate, tuple[Point, ...]]:
        points = tuple(
            graph.within(accuracy) if isinstance(accuracy, float) else graph.cut(accuracy) for graph, _ in graphs
        )
        made = sum(cost(harm, point.low) for harm, point in zip(harms, points, strict=True))
        text = str(policy if accuracy == "autocast" else replace(policy, accuracy=accuracy))
        return Candidate(
            text, sum(p.cost for p in points) / (full or 1), math.sqrt(made / unit) if unit else 0.0
        ), points

    plans: dict[tuple[frozenset[int], ...], Candidate] = {}
    for accuracy in ("autocast", *MULTIPLES, "fast"):
        found, points = candidate(accuracy)
        plans.setdefault(tuple(point.low for point in points), found)
    shares: defaultdict[str, float] = defaultdict(float)
    for (graph, _), harm, point in zip(graphs, harms, by_rules, strict=True):
        keys = node_keys(graph.problem.gm)
        for node, i in graph.made.of.items():
            if i in point.low and node in keys:
                casts = sum(term.price for term in harm.terms if i in term.lows and term.is_due(point.low))
                shares[keys[node]] += harm.low[i] + casts
    return Space(list(plans.values()), {key: share for key, share in shares.items() if share}, words)


def loss_of(out: Any) -> Any:
    """Return a loss as it is, a random mixture of other outputs; None if they have no gradients."""
    return out if out.numel() == 1 else projected(out)

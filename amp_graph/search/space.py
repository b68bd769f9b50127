"""Predicts the plans that are worth trying, and which operations make the error of the default one.

One forward and backward in fp32 captures the graphs and measures how much each rounding changes the outputs. Plans are
those that ``convert`` makes of a policy without a sample, so that the text of the policy is all that it takes to make
them again; their errors are predicted by the measured influences. What fp16 cannot hold is in the text as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from amp_graph.capture.sensitivity_sample import Sample, captured_by, in_fp32, measure
from amp_graph.devices import device_of_model
from amp_graph.errors import CaptureError
from amp_graph.numerics.batches import differentiate
from amp_graph.numerics.calibrate import Measuring
from amp_graph.numerics.compare import projected
from amp_graph.passes.calibration.calibration import Calibration
from amp_graph.passes.calibration.node_keys import node_keys
from amp_graph.passes.precision.convex_hull import Point
from amp_graph.passes.precision.error_budget_planner import ErrorBudget, harm_of
from amp_graph.passes.precision.machine_rates import is_faster_in, machine_for
from amp_graph.passes.precision.planning_problem import Problem
from amp_graph.passes.precision.precision_assignment import LOW_ALWAYS, cost
from amp_graph.passes.precision.predict_time import predicted
from amp_graph.policy import Policy
from amp_graph.policy_words import ACCURACIES, DTYPES
from amp_graph.search.proposals import Space
from amp_graph.search.trials import Trial

MULTIPLES = (0.5, 0.75, 0.9, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0)  # those of equal plans once
Step = Callable[[Any], Any]


def space_of(model: torch.nn.Module, sample: Sample, asked: Policy, *, trains: bool) -> Space:
    """Return what may be tried for ``model``; no plans but the default one if nothing of it is captured.

    ``sample``: returns a number with gradients, also of a model that is not trained.
    """
    device = device_of_model(model) or "cpu"
    machine = machine_for(asked.device or device)
    machine = machine if trains else replace(machine, keeps_weights=machine.device == "cpu")
    dtype = asked.torch_dtype(device)
    try:
        policy, note = _without_overflow(model, sample, asked)
        sampled = measure(model, policy, sample)
    except CaptureError:
        return Space([Trial(str(asked))], {}, _words(asked, device, trains, []))
    graphs = [(ErrorBudget(problem, machine, _name(dtype)), measured.of(problem)) for problem, measured in sampled]
    harms = [harm_of(graph.made, graph.influence if found is None else found) for graph, found in graphs]
    full = sum(graph.plans.point({LOW_ALWAYS}).cost for graph, _ in graphs) or 1
    unit = sum(cost(harm, graph.autocast.low) for (graph, _), harm in zip(graphs, harms, strict=True))
    plans: dict[tuple[frozenset[int], ...], Trial] = {}
    for one in _of_other_accuracies(policy, device):
        points = [point_of(graph, one) for graph, _ in graphs]
        made = sum(cost(harm, point.low) for harm, point in zip(harms, points, strict=True))
        time, error = sum(point.cost for point in points) / full, math.sqrt(made / unit) if unit else 0.0
        plans.setdefault(tuple(point.low for point in points), Trial(str(one), time, error))
    shares: defaultdict[str, float] = defaultdict(float)
    for (graph, _), harm, low in zip(graphs, harms, next(iter(plans)), strict=True):
        keys = node_keys(graph.problem.gm)
        for node, i in graph.made.of.items():
            if i in low and node in keys:
                casts = (term.price for term in harm.terms if i in term.lows and term.is_due(low))
                shares[keys[node]] += harm.low[i] + sum(casts)
    problems = [problem for problem, _ in sampled]
    others = [
        Trial(
            str(_without_overflow(model, sample, replace(asked, dtype=word))[0]),
            sum(ErrorBudget(problem, machine, _name(other)).cut("autocast").cost for problem in problems) / full,
            torch.finfo(other).eps / torch.finfo(dtype).eps,
        )
        for word, other in DTYPES.items()
        if other != dtype and is_faster_in(machine, _name(other))
    ]
    return Space(
        [*plans.values(), *others],
        {key: share for key, share in shares.items() if share},
        _words(asked, device, trains, problems),
        note,
    )


def _of_other_accuracies(policy: Policy, device: str) -> list[Policy]:
    """Return ``policy``, and if it leaves the accuracy open, those of all others."""
    is_planned = policy.planner == "mincut" and policy.op_list(device).unlisted == "opaque"
    if not is_planned or (policy.accuracy, policy.skip_unprofitable) != ("autocast", ""):
        return [policy]
    named = [replace(policy, accuracy=one, skip_unprofitable=skip) for one in ACCURACIES for skip in ("", "true")]
    return [*named, *(replace(policy, accuracy=one) for one in MULTIPLES)]


def point_of(graph: ErrorBudget, policy: Policy) -> Point:
    """Return the plan that ``policy`` chooses for a graph."""
    if policy.budget is not None:
        found = graph.within(policy.budget)
    else:
        accuracy, is_painted = str(policy.accuracy), policy.planner == "paint"
        found = graph.painted(accuracy) if is_painted else graph.cut(accuracy, policy.leaves == "true")
    left = policy.leaves == "graphs" and not predicted(graph.made, found.low).is_worth_it
    return graph.plans.point({LOW_ALWAYS}) if left else found


def _words(policy: Policy, device: str, trains: bool, problems: Sequence[Problem]) -> list[tuple[str, Any]]:
    """Return the words that may pay on ``device``, for a model with such graphs, and that ``policy`` leaves open."""
    names = {name for problem in problems for kind in problem.classes.values() for name in kind.names}
    words: list[tuple[str, Any]] = (
        [("replay", True)] * (device == "cuda")
        + [("level", "O2")] * trains
        + [("skip", ("channels_last",))] * any("conv" in name for name in names)
        + [("recompute", "all")] * trains
    )
    return [(name, value) for name, value in words if getattr(policy, name) == getattr(Policy(), name)]


def _without_overflow(model: torch.nn.Module, sample: Sample, policy: Policy) -> tuple[Policy, str]:
    """Return ``policy``, which keeps in fp32 what its dtype cannot hold, if that is fp16; and a note of it."""
    device = device_of_model(model) or "cpu"
    if policy.torch_dtype(device) != torch.float16 or policy.calibration:
        return policy, ""
    measuring = Measuring(in_fp32(policy), device)
    with captured_by(model, policy, measuring.take):
        differentiate(model, sample(model), measuring.leaves)
    measuring.end_batch()
    out = Calibration(measuring.values).out_of_range()
    kept = {key: why for key, why in out.items() if measuring.values[key].free and key not in policy.keep_ops}
    if not kept:
        return policy, ""
    first, why = next(iter(kept.items()))
    note = f"; {len(kept)} operations stay in fp32, as fp16 cannot hold their values: {first}: {why}"
    return replace(policy, keep_ops=(*policy.keep_ops, *kept)), note


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def loss_of(out: Any) -> Any:
    """Return a loss as it is, a random mixture of other outputs; None if they have no gradients."""
    return out if out.numel() == 1 else projected(out)

"""``amp-graph plan``: the predicted speed and error of a policy's plan; with ``--sweep``, measured as well.

Before: ``--policy bf16,accuracy=1.5``. After: its time, error and casts beside those of autocast, fast and fp32; or
a row for each error budget.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from amp_graph.capture.sensitivity_sample import Sampled
from amp_graph.cli.benchmark_policies import ROUNDS, Loss, train
from amp_graph.cli.capture_target import sampled
from amp_graph.cli.main import BUDGETS
from amp_graph.cli.plan_estimates import Figures, Plans, plans_for
from amp_graph.cli.terminal import write_json, write_table
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError
from amp_graph.policy import Policy

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
    model, policy = target.model, target.policy
    plans = plans_for(found, policy, device_of_model(model) or "cpu")
    if args.json:
        return _print_json(plans, multiples, model, loss, found)
    machine = plans.machine
    print(f"{len(found)} graph{'s' * (len(found) > 1)}, {policy}, planned for {machine.name} ({machine.description})")
    if multiples:
        _sweep(plans, multiples, model, loss, found)
    else:
        write_table(COLUMNS, [(row, "") for row in _rows(plans)], sys.stdout)
    return 0


def named(policy: Policy, accuracy: str | float) -> Policy:
    """Return ``policy`` with another accuracy and that accuracy's default planner."""
    return replace(policy, accuracy=accuracy, planner="mincut", skip_unprofitable="false")


def _print_json(plans: Plans, multiples: list[float], model: torch.nn.Module, loss: Loss, found: list[Sampled]) -> int:
    told = {"policy": str(plans.policy), "machine": plans.machine.name, "graphs": len(found)}
    rows = [_as_dict(name, one) for name, one in _plans(plans)]
    if multiples:
        swept = _swept_plans(plans, multiples, model, loss, found)
        names = ("speed", "gradient_error", "worst_parameter")
        rows = [_as_dict(name, one) | dict(zip(names, measured, strict=True)) for name, one, measured in swept]
    write_json({**told, "plans": rows}, sys.stdout)
    return 0


def _as_dict(name: str, one: Figures) -> dict[str, object]:
    """Return a plan's figures; ``error`` is over that of accuracy=autocast."""
    return {
        "plan": name, "predicted_us": one.picoseconds / 1e6, "predicted_error": one.error,
        "low": one.low, "full": one.full, "casts": one.casts,
    }  # fmt: skip


def _plans(plans: Plans) -> list[tuple[str, Figures]]:
    others = [(f"accuracy={word}", plans.figures(named(plans.policy, word))) for word in ("autocast", "fast")]
    return [(str(plans.policy), plans.figures(plans.policy)), *others, ("full precision", plans.in_full())]


def _rows(plans: Plans) -> list[tuple[str, ...]]:
    base = plans.figures(named(plans.policy, "autocast"))
    return [
        (name, f"{one.picoseconds / 1e6:.1f}", _ratio(base.picoseconds, one.picoseconds), *_counts(one))
        for name, one in _plans(plans)
    ]


def _counts(one: Figures) -> tuple[str, ...]:
    return f"{one.error:.3f}", str(one.low), str(one.full), str(one.casts)


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "-"


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


def _sweep(plans: Plans, multiples: list[float], model: torch.nn.Module, loss: Loss, found: list[Sampled]) -> None:
    swept = list(_swept_plans(plans, multiples, model, loss, found))
    base = swept[0][1]
    rows = [_swept(name, one, base, measured) for name, one, measured in swept]
    write_table(SWEPT, [(row, "") for row in rows], sys.stdout)
    print(NOTE.format(rounds=ROUNDS))


def _swept_plans(
    plans: Plans, multiples: list[float], model: torch.nn.Module, loss: Loss, found: list[Sampled]
) -> Iterator[tuple[str, Figures, tuple[float, float, float]]]:
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
        yield name, one, (told.speed_to(of_base), *told.errors_to(of_base))


def _swept(name: str, one: Figures, base: Figures, measured: tuple[float, float, float]) -> tuple[str, ...]:
    shown = (f"{figure:.3f}" for figure in measured)
    return name, _ratio(base.picoseconds, one.picoseconds), *_counts(one), *shown

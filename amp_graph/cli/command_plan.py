"""``amp-graph plan``: the predicted time and error of a policy's plan; with ``--sweep``, measured as well.

Before: ``--policy bf16,accuracy=1.5``. After: its time, error and casts beside those of autocast, fast and fp32; or
a row for each error budget.
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import redirect_stdout
from dataclasses import replace

import torch

from amp_graph.capture.sensitivity_sample import Sampled
from amp_graph.cli.benchmark_policies import Loss, Trained, train
from amp_graph.cli.capture_target import sampled
from amp_graph.cli.main import BUDGETS
from amp_graph.cli.plan_estimates import Figures, Plans, plans_for
from amp_graph.cli.terminal import write_table
from amp_graph.devices import device_of_model
from amp_graph.errors import AmpGraphError
from amp_graph.policy import Policy

COLUMNS = ("plan", "predicted us", "to autocast", "predicted error", "low", "full", "casts")
SWEPT = (
    "budget", "predicted time", "predicted error", "low", "full", "casts",
    "measured time", "gradient error", "worst parameter",
)  # fmt: skip
NOTE = """\
All figures are ratios to the plan of accuracy=autocast. Time: forward and backward, median of {rounds} interleaved
rounds. Gradient error: against fp32 on this batch, the median over parameters of the ratio, and the largest."""


def run(args: argparse.Namespace) -> int:
    """Sample TARGET, plan it, and print the table."""
    multiples = _multiples(args.sweep) if args.sweep is not None else []
    model, loss, policy, found = sampled(args.target, args.input, args.policy, args.training)
    plans = plans_for(found, policy, device_of_model(model) or "cpu")
    machine = plans.machine
    print(f"{len(found)} graph{'s' * (len(found) > 1)}, {policy}, planned for {machine.name} ({machine.description})")
    if multiples:
        _sweep(plans, multiples, model, loss, found)
    else:
        write_table(COLUMNS, [(row, "") for row in _rows(plans)], sys.stdout)
    return 0


def named(policy: Policy, accuracy: str | float) -> Policy:
    """Return ``policy`` with another accuracy and that accuracy's default planner."""
    return replace(policy, accuracy=accuracy, planner="", skip_unprofitable="false")


def _rows(plans: Plans) -> list[tuple[str, ...]]:
    base = plans.figures(named(plans.policy, "autocast"))
    asked = plans.figures(plans.policy)
    others = [(f"accuracy={word}", plans.figures(named(plans.policy, word))) for word in ("autocast", "fast")]
    found = [(str(plans.policy), asked), *others, ("full precision", plans.in_full())]
    return [
        (name, f"{one.picoseconds / 1e6:.1f}", _ratio(one.picoseconds, base.picoseconds), *_counts(one))
        for name, one in found
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


def _sweep(
    plans: Plans, multiples: list[float], model: torch.nn.Module, loss: Loss, found: list[Sampled], rounds: int = 15
) -> None:
    policies = {word: named(plans.policy, word) for word in ("autocast", "fast")}
    policies |= {f"{one:g}": named(plans.policy, one) for one in multiples}
    figures = {name: plans.figures(policy) for name, policy in policies.items()}
    first = {one.points: name for name, one in reversed(figures.items())}  # equal plans are measured once
    distinct = list(dict.fromkeys(first[one.points] for one in figures.values()))
    measured = tuple(one.measured for one in found)
    with redirect_stdout(sys.stderr):  # keep the user's prints out of our output
        trained = train(model, loss, [policies[name] for name in distinct], measured, rounds)
    of_plan = dict(zip(distinct, trained, strict=True))
    base, of_base = figures["autocast"], of_plan["autocast"]
    rows = [_swept(name, one, base, of_plan[first[one.points]], of_base) for name, one in figures.items()]
    write_table(SWEPT, [(row, "") for row in rows], sys.stdout)
    print(NOTE.format(rounds=rounds))


def _swept(name: str, one: Figures, base: Figures, trained: Trained, of_base: Trained) -> tuple[str, ...]:
    median, worst = trained.errors_to(of_base)
    took = f"{trained.time_to(of_base):.3f}"
    return name, _ratio(one.picoseconds, base.picoseconds), *_counts(one), took, f"{median:.3f}", f"{worst:.3f}"

"""``amp-graph cost``: measures whether low precision pays: fp32, torch.autocast and the plan side by side.

Before: ``model.py:build``. After: a row for each, with its speed over fp32's, and a verdict in a line.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from amp_graph.cli.capture_target import loss_or_mixture, plain_target, users_code
from amp_graph.cli.target import Target
from amp_graph.cli.terminal import Told
from amp_graph.convert import convert
from amp_graph.devices import device_of_model
from amp_graph.freeze import freeze
from amp_graph.lists.errors import Attempt
from amp_graph.passes.graph.graph_text import aligned
from amp_graph.policy_words import word_of
from amp_graph.report.model_report import report
from amp_graph.report.page_summary import AUTOCAST, FULL, OURS
from amp_graph.search.bench import seconds_of

COLUMNS = ("precision", "time", "measured speed", "predicted speed")
CLEAR = 1.05  # a speed over fp32's below which a gain is within what a measurement varies by
WARM_UP, ROUNDS = 3, 9
TURN = 0.01  # seconds: shorter steps are repeated within a turn, so often that they take as long
FROZEN = "amp_graph, frozen"
Steps = dict[str, Callable[[], None]]


def run(args: argparse.Namespace) -> Told:
    """Measure TARGET in turns; a model in training mode with its backward."""
    with users_code():
        target = plain_target(args)
        device = device_of_model(target.model) or "cpu"
        low = word_of(target.policy.torch_dtype(device))
        if target.policy.dtype == "auto":  # which may stay in fp32, and whether it should is asked here
            target = replace(target, policy=replace(target.policy, dtype=low))
        grad = target.model.training
        steps, ours = steps_of(target, grad=grad)
        summary = report(ours, times=interleaved(steps, device)).summary()
    rows = [row for row in summary["speeds"] if row["seconds"]]
    told = {
        "model": type(target.model).__name__, "policy": str(target.policy), "gradients": grad, "device": device,
        "threads": torch.get_num_threads(), "machine": summary["machine"], "rows": rows, "verdict": verdict(rows, low),
    }  # fmt: skip
    head = ", ".join(f"{key} {told[key]}" for key in ("model", "policy", "device", "threads", "gradients", "machine"))
    cells = [
        (row["name"], f"{1e3 * row['seconds']:.3g} ms",
         *("-" if row[key] is None else f"{row[key]:.2f}" for key in ("measured", "predicted")))
        for row in rows
    ]  # fmt: skip
    how = f"medians of {ROUNDS} turns; speed over fp32's, above 1 is faster"
    return Told(told, [head, how, *aligned([COLUMNS, *cells]), told["verdict"]])


def verdict(rows: list[dict[str, Any]], low: str) -> str:
    """Return what to do on this machine: what is fastest, or fp32 where nothing is clearly faster."""
    speeds = {row["name"]: row["measured"] for row in rows if row["measured"] and row["name"] != FULL}
    best = max(speeds, key=lambda name: speeds[name])
    told = f"{low} with {best}: {speeds[best]:.2f} times fp32's speed"
    return told if speeds[best] >= CLEAR else f"keep fp32 on this machine; at best {told}"


def steps_of(target: Target, *, grad: bool) -> tuple[Steps, torch.nn.Module]:
    """Return what to measure, by name, and the converted copy; without ``grad`` calls have no gradients."""
    plain, device = target.model, device_of_model(target.model) or "cpu"
    ours = convert(copy.deepcopy(plain), target.policy)
    autocast = torch.autocast(device, target.policy.torch_dtype(device))

    def step(model: torch.nn.Module, precision: AbstractContextManager[object]) -> None:
        model.zero_grad()
        with torch.set_grad_enabled(grad), precision:
            loss = loss_or_mixture(target.call(model))
        if loss.requires_grad:
            loss.backward()

    steps = {
        FULL: lambda: step(plain, nullcontext()),
        AUTOCAST: lambda: step(plain, autocast),
        OURS: lambda: step(ours, nullcontext()),
    }
    if not grad:
        frozen = freeze(convert(copy.deepcopy(plain), target.policy))
        steps[FROZEN] = lambda: step(frozen, nullcontext())
    return steps, ours


def interleaved(steps: Steps, device: str) -> dict[str, float]:
    """Return the median seconds of each step, which take turns; a step other than the first that fails is left out."""
    taken: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for name, step in steps.items():
        passed = () if taken else (Exception,)
        with Attempt(*passed) as tried:  # autocast fails in some models that run in fp32
            calls[name] = max(1, min(100, int(TURN / min(seconds_of(step, 1, device) for _ in range(WARM_UP)))))
            taken[name] = []
        if tried.error is not None:
            print(f"{name}: fails: {tried.reason}", file=sys.stderr)
    for _ in range(ROUNDS):
        for name, times in taken.items():
            times.append(seconds_of(steps[name], calls[name], device))
    return {name: statistics.median(times) for name, times in taken.items()}

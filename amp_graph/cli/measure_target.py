"""Measures the model that TARGET names in fp32, under torch.autocast, and converted, in turns.

Before: ``model.py:build`` and its inputs. After: ``{"fp32": 0.21, "torch.autocast": 0.14, "amp_graph": 0.11}`` seconds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from amp_graph.cli.capture_target import loss_or_mixture, plain_target, users_code
from amp_graph.cli.target import Target
from amp_graph.convert import convert
from amp_graph.devices import device_of_model
from amp_graph.freeze import freeze
from amp_graph.lists.errors import Attempt
from amp_graph.report.page_summary import AUTOCAST, FULL, OURS

WARM_UP, ROUNDS = 3, 9
TURN = 0.01  # seconds: shorter steps are repeated within a turn, so often that they take as long
FROZEN = "amp_graph, frozen"
Steps = dict[str, Callable[[], None]]


def measured_times(args: argparse.Namespace) -> dict[str, float]:
    """Return the median seconds of a call, and of its backward where it has gradients."""
    with users_code():
        target = plain_target(args)
        steps, _ = steps_of(target, grad=True)
        return interleaved(steps, device_of_model(target.model) or "cpu")


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
            seconds = [_seconds(step, 1, device) for _ in range(WARM_UP)]
        if tried.error is not None:
            print(f"{name}: fails: {type(tried.error).__name__}: {tried.error}", file=sys.stderr)
            continue
        taken[name], calls[name] = [], max(1, min(100, int(TURN / min(seconds))))
    for _ in range(ROUNDS):
        for name, times in taken.items():
            times.append(_seconds(steps[name], calls[name], device))
    return {name: statistics.median(times) for name, times in taken.items()}


def _seconds(step: Callable[[], None], calls: int, device: str) -> float:
    start = _now(device)
    for _ in range(calls):
        step()
    return (_now(device) - start) / calls


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

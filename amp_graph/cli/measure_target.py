"""Measures the model that TARGET names in fp32, under torch.autocast, and converted, for a report's times.

Before: ``model.py:build`` and its inputs. After: ``{"fp32": 0.21, "torch.autocast": 0.14, "amp_graph": 0.11}`` seconds.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.cli.capture_target import loss_or_mixture, quiet
from amp_graph.cli.target import load_target
from amp_graph.convert import convert, revert
from amp_graph.devices import device_of_model
from amp_graph.policy import Policy
from amp_graph.report.page_summary import AUTOCAST, FULL, OURS

WARM_UP, ROUNDS = 2, 7


def measured_times(
    text: str, inputs: Sequence[str] = (), policy: str | None = None, training: bool | None = None
) -> dict[str, float]:
    """Return the median seconds of a call, and of its backward where it has gradients; the runs take turns."""
    with redirect_stdout(sys.stderr), quiet():
        target = load_target(text, inputs)
        plain, present = target.model, conversion_of(target.model)
        wanted = Policy.parse(policy if policy is not None or present is None else str(present.policy))
        if present is not None:
            revert(plain)
        if training is not None:
            plain.train(training)
        device = device_of_model(plain) or "cpu"
        dtype = wanted.torch_dtype(device)
        ours = convert(copy.deepcopy(plain), wanted)

        def step(model: torch.nn.Module, precision: AbstractContextManager[object]) -> None:
            model.zero_grad()
            with precision:
                loss = loss_or_mixture(model(*target.args, **target.kwargs))
            if loss.requires_grad:
                loss.backward()

        return _interleaved({
            FULL: lambda: step(plain, nullcontext()),
            AUTOCAST: lambda: step(plain, torch.autocast(device, dtype)),
            OURS: lambda: step(ours, nullcontext()),
        }, device)  # fmt: skip


def _interleaved(steps: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            start = _now(device)
            step()
            taken[name] += [_now(device) - start] if turn >= WARM_UP else []
    return {name: statistics.median(times) for name, times in taken.items()}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

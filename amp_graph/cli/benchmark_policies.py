"""Measures step time and gradient error of a model under several policies, in interleaved steps.

Before: a model, its loss, and policies. After: a ``Trained`` for each: times, and gradient errors against fp32.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from amp_graph.capture.conversion import conversion_of
from amp_graph.convert import convert
from amp_graph.devices import device_of_model
from amp_graph.passes.precision.sensitivity import Measured
from amp_graph.policy import Policy

Loss = Callable[[torch.nn.Module], torch.Tensor]
Gradients = dict[str, torch.Tensor]
ROUNDS, WARM_UP = 15, 2
ZERO = 1e-5  # a gradient this much smaller than the average is zero up to rounding
EXACT = 1e-6  # smaller errors are fp32's own rounding


@dataclass(frozen=True)
class Trained:
    """Steps under one policy: the seconds of each round, and each parameter's relative gradient error."""

    seconds: tuple[float, ...]
    errors: Mapping[str, float]

    def speed_to(self, other: Trained) -> float:
        """Return the speed as a multiple of ``other``'s: the median over rounds."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))

    def errors_to(self, other: Trained) -> tuple[float, float]:
        """Return the median and the largest ratio of the parameters' errors; 1 if there is nothing to compare."""
        ratios = [e / other.errors[name] for name, e in self.errors.items() if other.errors[name] > EXACT]
        return (statistics.median(ratios), max(ratios)) if ratios else (1.0, 1.0)


def train(
    model: torch.nn.Module, loss: Loss, policies: list[Policy], measured: tuple[Measured, ...], rounds: int = ROUNDS
) -> list[Trained]:
    """Measure steps of ``loss`` (forward and backward, no update) under each of ``policies``.

    Each policy gets a copy of the model and the same random numbers; the model itself does not change.
    """
    plain = copy.deepcopy(model)
    models = [_converted(model, policy, measured) for policy in policies]
    exact = _gradients(plain, loss)
    errors = [_errors(_gradients(one, loss), exact) for one in models]
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(WARM_UP + rounds):
        for taken, one in zip(seconds, models, strict=True):
            step = _seconds(one, loss)
            taken += [step] if turn >= WARM_UP else []
    return [Trained(tuple(s), e) for s, e in zip(seconds, errors, strict=True)]


def _converted(model: torch.nn.Module, policy: Policy, measured: tuple[Measured, ...]) -> torch.nn.Module:
    made = convert(copy.deepcopy(model), policy)
    found = conversion_of(made)
    assert found is not None, "convert attaches a conversion"
    found.measured = measured
    return made


def _gradients(model: torch.nn.Module, loss: Loss) -> Gradients:
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    _step(model, loss)
    found = {name: p.grad.detach().double() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return found


def _step(model: torch.nn.Module, loss: Loss) -> None:
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss(model).backward()


def _seconds(model: torch.nn.Module, loss: Loss) -> float:
    """Return the seconds of a step: CPU time for a model on the CPU, else wall time."""
    on_cpu = device_of_model(model) is None
    clock = time.process_time if on_cpu else time.perf_counter
    if not on_cpu:
        torch.cuda.synchronize()
    start, steps, taken = clock(), 0, 0.0
    while taken <= 0:  # a clock of the process may advance by milliseconds: more steps than one then
        _step(model, loss)
        if not on_cpu:
            torch.cuda.synchronize()
        steps, taken = steps + 1, clock() - start
    return taken / steps


def _errors(got: Gradients, exact: Gradients) -> dict[str, float]:
    """Return each gradient's relative error, without gradients that are zero in exact arithmetic."""
    sizes = {name: g.square().mean().sqrt().item() for name, g in exact.items()}
    usual = statistics.fmean(sizes.values()) if sizes else 0.0
    told = [name for name, size in sizes.items() if size > ZERO * usual]
    return {name: ((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in told if name in got}

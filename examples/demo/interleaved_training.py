"""Trains all variants of a task at once, one step of each in turn, so that their times compare.

A shared machine's noise falls on neighbours alike: the figure is the ratio within each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from examples.demo.explain import counts
from examples.demo.measure import casts_and_saved
from examples.demo.tasks import Phase, Task, built
from examples.demo.variants import VARIANTS, Trainee, Variant

WARM_UP = 3  # rounds that capture, allocate and fill caches; trained, but not timed
LEAST = 6  # rounds to run whatever the clock says
APART = 100_000  # between the batches of one seed and those of the next


@dataclass(frozen=True)
class Result:
    """What the table says of one variant."""

    variant: str
    steps: int
    batch: int
    loss: float
    held_out_loss: float
    held_out_accuracy: float
    speed: tuple[float, float, float]
    milliseconds: float
    casts: int
    saved_mb: float
    operations: dict[str, int]
    losses: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def race(
    task: Task,
    phase: Phase,
    advance: Callable[[], None],
    seed: int = 0,
    variants: Sequence[Variant] | None = None,
) -> tuple[list[Trainee], list[Result]]:
    """Train every variant of a phase on the same batches, and say how each did.

    seed: of the starting weights, the batches and the dropout, which are the same for every variant.
    variants: others than those of the phase's dtype; one of them under autocast, which the times are compared with.
    """
    start = built(task, seed)
    trainees = [Trainee.of(task, phase, variant, start) for variant in variants or VARIANTS[phase.dtype]]
    train(trainees, phase, advance, seed)
    for one in trainees:
        one.remember_report()
    reference = next(one for one in trainees if one.variant.autocast)
    return trainees, [_result(one, reference) for one in trainees]


def train(trainees: list[Trainee], phase: Phase, advance: Callable[[], None], seed: int = 0) -> None:
    """Train all for the steps of a phase, one step of each in turn."""
    end = time.monotonic() + phase.seconds
    first = seed * APART
    for step in range(first, first + phase.steps):
        batch = trainees[0].task.data.batch(step, phase.batch)
        shift = step % len(trainees)  # nobody is always first, or always after the same neighbour's caches
        for one in trainees[shift:] + trainees[:shift]:
            torch.manual_seed(step)
            began = time.perf_counter()
            loss = one.step(batch)
            one.seconds.append(time.perf_counter() - began)
            one.losses.append(float(loss))
        advance()
        if step + 1 - first >= LEAST and time.monotonic() > end:
            break


def _result(one: Trainee, reference: Trainee) -> Result:
    last = max(1, len(one.losses) // 10)
    held_loss, held_accuracy = one.held_out()  # first: another forward would move batch norm's statistics
    casts, saved = casts_and_saved(one.model, lambda: one.forward(one.task.data.batch(0, one.phase.batch))[0])
    return Result(
        variant=one.variant.name,
        steps=len(one.losses),
        batch=one.phase.batch,
        loss=statistics.fmean(one.losses[-last:]),
        held_out_loss=held_loss,
        held_out_accuracy=held_accuracy,
        speed=_speed(one.seconds, reference.seconds),
        milliseconds=1e3 * statistics.median(_timed(one.seconds)),
        casts=casts,
        saved_mb=saved,
        operations=counts(one.report),
        losses=tuple(one.losses),
    )


def _timed(seconds: list[float]) -> list[float]:
    return seconds[min(WARM_UP, len(seconds) - 1) :]


def _speed(mine: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles of the speed round by round: their time divided by mine."""
    ratios = [b / a for a, b in zip(_timed(mine), _timed(theirs), strict=True)]
    if len(ratios) < 2:
        return (ratios[0],) * 3
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high

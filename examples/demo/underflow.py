"""Why fp16 needs loss scaling: a loss so small that fp16 holds none of its gradients, with and without scaling.

Before: ``(WEIGHT * loss).backward()`` in fp16: every gradient is zero, and nothing is learnt. After:
``scaler.scale(WEIGHT * loss).backward()``: learnt as in fp32.
Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2 and figure 3.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from amp_graph.errors import AmpGraphWarning
from examples.demo.data import Batch, Digits
from examples.demo.interleaved_training import train
from examples.demo.models import narrow_stack
from examples.demo.tasks import Phase, Task, built, call
from examples.demo.variants import FP32, Trainee, Variant

NAME = "underflow"
BATCH = 32
# As the weight of one loss among others, or the mean over a million pixels. A logit's gradient is then at most
# WEIGHT / BATCH = 2**-25, half of fp16's smallest number, and that rounds to zero.
WEIGHT = 2.0**-20
SMALLEST = -24  # fp16's smallest number is two to this power

VARIANTS = (
    FP32,
    Variant("autocast fp16, no loss scale", autocast=torch.float16),
    Variant("amp_graph fp16, no loss scale", policy="fp16"),
    Variant("amp_graph fp16, loss scale", policy="fp16", scaled=True),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one variant.

    zeros: how many of the parameters' gradient values were zero in the first step, where all variants have the same
    weights. exponents: how many of the others had which power of two, as backward left them, loss scale included.
    """

    variant: str
    steps: int
    loss: float
    held_out_loss: float
    held_out_accuracy: float
    zeros: int
    values: int
    exponents: dict[int, int]
    losses: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def phase(*, quick: bool = False, steps: int | None = None) -> Phase:
    """Return how long the variants are trained."""
    return Phase("fp16", steps or (60 if quick else 150), BATCH, 30)


def underflow(chosen: Phase, advance: Callable[[], None]) -> list[Outcome]:
    """Train the same small network on the faint loss in every variant, and say what became of each."""
    title = "narrow stack on digits, loss weighted by 2^-20"
    task = Task(NAME, title, narrow_stack, Digits.load(), call, 3e-3, (chosen,), WEIGHT)
    start = built(task)
    trainees = [Trainee.of(task, chosen, variant, start) for variant in VARIANTS]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "amp_graph: .*too small for fp16", AmpGraphWarning)  # which is what it shows
        first = [_exponents(one, task.data.batch(0, BATCH)) for one in trainees]
        train(trainees, chosen, advance)
    return [_outcome(one, found) for one, found in zip(trainees, first, strict=True)]


def _exponents(one: Trainee, batch: Batch) -> Counter[int]:
    """Count the gradient values of one backward that are not zero, by their power of two. Nothing is updated."""
    one.backward(batch)
    values = torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None])
    one.optimizer.zero_grad()
    return Counter(torch.log2(values[values != 0].abs().double()).floor().int().tolist())


def _outcome(one: Trainee, exponents: Counter[int]) -> Outcome:
    values = sum(p.numel() for p in one.model.parameters())
    held_loss, held_accuracy = one.held_out()
    return Outcome(
        variant=one.variant.name,
        steps=len(one.losses),
        loss=statistics.fmean(one.losses[-max(1, len(one.losses) // 10) :]),
        held_out_loss=held_loss,
        held_out_accuracy=held_accuracy,
        zeros=values - exponents.total(),
        values=values,
        exponents=dict(sorted(exponents.items())),
        losses=tuple(one.losses),
    )

"""What is trained: a model, its data and how long, under a short name (``cnn``, ``gpt``, ``hf``).

``task("gpt", quick=False)`` is the character GPT with its batches and its number of steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from amp_graph.passes.torch_compat.devices import multiplies_bf16
from examples.demo import models
from examples.demo.data import SYMBOLS, Batch, Digits, SourceText, _missing

NAMES = ("cnn", "gpt", "hf")


@dataclass(frozen=True)
class Phase:
    """One race: so many steps of batches of this size, ended early after ``seconds``."""

    dtype: str
    steps: int
    batch: int
    seconds: float


@dataclass(frozen=True)
class Task:
    """A model with its data, its loss and its two races, one for each low precision.

    weight: what the loss is multiplied by before backward; reported losses are without it.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    data: Digits | SourceText
    logits: Callable[[nn.Module, Tensor], Tensor]
    rate: float
    phases: tuple[Phase, ...]
    weight: float = 1.0

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and which of its predictions are right."""
        inputs, targets = batch
        logits = self.logits(model, inputs).flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten()), logits.argmax(-1) == targets.flatten()


def task(name: str, *, quick: bool = False, steps: int | None = None) -> Task:
    """Return the task of that name. Raises MissingData where its package is not installed."""
    made = {"cnn": _cnn, "gpt": _gpt, "hf": _hf}[name](quick)
    phases = made.phases
    if quick:
        phases = (Phase("bf16", 20, 32, 60), Phase("fp16", 4, 2, 60))
        made = replace(made, rate=5e-3)
    if steps is not None:
        phases = tuple(replace(p, steps=steps if p.dtype == "bf16" else max(2, steps // 5)) for p in phases)
    return replace(made, phases=phases)


def has_bf16_arithmetic() -> bool:
    """Say whether this CPU has instructions for bf16 matrix products."""
    return multiplies_bf16()


def has_transformers() -> bool:
    """Say whether Hugging Face transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def call(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits of a model that returns nothing else."""
    return model(inputs)


def _call_hf(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(input_ids=inputs).logits


def _cnn(quick: bool) -> Task:
    widths = (8, 16) if quick else (16, 32, 64)
    phases = _phases(32, 4)
    return Task("cnn", "ResNet on digits", lambda: models.ResNet(widths), Digits.load(), call, 1e-3, phases)


def _gpt(quick: bool) -> Task:
    sizes = {"length": 32, "width": 32, "layers": 2} if quick else {"length": 64, "width": 96, "layers": 2}
    phases = _phases(8, 2)
    data = SourceText.load(sizes["length"], 200_000 if quick else 1_500_000)
    build = lambda: models.CharGPT(len(SYMBOLS), **sizes)  # noqa: E731
    return Task("gpt", "character GPT on Python's source text", build, data, call, 1e-3, phases)


def _hf(quick: bool) -> Task:
    if not has_transformers():
        raise _missing("transformers")
    sizes = {"length": 32, "width": 32, "layers": 1} if quick else {"length": 64, "width": 96, "layers": 2}
    phases = _phases(8, 2)
    data = SourceText.load(sizes["length"], 200_000 if quick else 1_500_000)
    build = lambda: models.hf_gpt2(len(SYMBOLS), **sizes)  # noqa: E731
    return Task("hf", "Hugging Face GPT-2 on Python's source text", build, data, _call_hf, 1e-3, phases)


def _phases(batch: int, fp16_batch: int) -> tuple[Phase, ...]:
    """Return the two races. With those of all models they end within five minutes, installation included."""
    if not has_bf16_arithmetic():
        batch //= 2
    return Phase("bf16", 150, batch, 20), Phase("fp16", 20, fp16_batch, 10)


def built(chosen: Task, seed: int = 0) -> nn.Module:
    """Return the task's model with the starting weights of a seed, the same for every variant."""
    torch.manual_seed(1 + seed)
    return chosen.build()

"""How a step is trained: fp32, torch.autocast, or amp_graph; each with its own copy of the model.

``Trainee(task, VARIANTS["bf16"][2], model).step(batch)`` is one training step.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import amp_graph
from amp_graph.report import Report
from examples.demo.data import Batch
from examples.demo.tasks import Phase, Task


@dataclass(frozen=True)
class Variant:
    """One way to run the same training: under autocast in a dtype, or converted with a policy."""

    name: str
    autocast: torch.dtype | None = None
    policy: str = ""
    scaled: bool = False
    growth_interval: int = 2000


FP32 = Variant("fp32")
DEFAULT = Variant("amp_graph, no policy", policy="auto")  # convert(model): fp32 where that is predicted to be faster
VARIANTS = {
    "bf16": (
        FP32,
        Variant("autocast bf16", autocast=torch.bfloat16),
        Variant("amp_graph bf16", policy="bf16"),
        Variant("amp_graph bf16 fast", policy="bf16,accuracy=fast"),
    ),
    "fp16": (
        FP32,
        Variant("autocast fp16", autocast=torch.float16, scaled=True),
        Variant("amp_graph fp16", policy="fp16", scaled=True),
    ),
}


@dataclass
class Trainee:
    """A copy of the task's model, its optimizer, and how it did."""

    task: Task
    phase: Phase
    variant: Variant
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    report: Report | None = None
    steps_skipped: int = 0

    @staticmethod
    def of(task: Task, phase: Phase, variant: Variant, start: nn.Module) -> Trainee:
        """Return a trainee with a copy of the starting weights; amp_graph converts it, in one line."""
        model = copy.deepcopy(start)
        if variant.policy:
            amp_graph.convert(model, variant.policy)
        return Trainee(task, phase, variant, model)

    def __post_init__(self) -> None:
        eps = 1e-8 * self.task.weight  # the update is then the same for every weight of the loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.task.rate, eps=eps, fused=True)
        scaler = amp_graph.GradScaler if self.variant.policy else torch.amp.GradScaler
        every = self.variant.growth_interval
        self.scaler = scaler("cpu", enabled=self.variant.scaled, growth_interval=every)

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch, as a user's loop does."""
        loss = self.backward(batch)
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.steps_skipped += self.scaler.get_scale() < before
        return loss

    def backward(self, batch: Batch) -> Tensor:
        """Leave the gradients of one batch in ``.grad``, scaled where the variant scales; return the loss."""
        self.optimizer.zero_grad()
        loss = self.forward(batch)[0]
        self.scaler.scale(self.task.weight * loss).backward()
        return loss.detach()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss and the right predictions of a batch, in the variant's precision."""
        dtype = self.variant.autocast
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            return self.task.loss(self.model, batch)

    def held_out(self) -> tuple[float, float]:
        """Return loss and accuracy on what was not trained on."""
        self.model.eval()
        losses, right = [], []
        with torch.no_grad():
            for batch in self.task.data.held_out(self.phase.batch):
                loss, hits = self.forward(batch)
                losses.append(float(loss))
                right.append(float(hits.float().mean()))
        self.model.train()
        return statistics.fmean(losses), statistics.fmean(right)

    def remember_report(self) -> None:
        """Keep the report of the graphs captured so far: those of training."""
        if self.variant.policy:
            self.report = amp_graph.report(self.model, self.optimizer)

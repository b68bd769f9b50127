"""Optimization levels O0 to O3 of a model with its optimizer, their checkpoints, and the table of the levels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import amp_graph

LEVELS = ("O0", "O1", "O2", "O3")
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
WARM_UP = 3  # steps that are not timed: the first one captures the model


@dataclass
class Training:
    """A model at a level, its optimizer, and what an epoch of it was like.

    O0 to O2 have a MixedPrecisionOptimizer, as apex's scripts do: it scales the loss, and updates fp32 masters at O2.
    O3, the speed to compare with, has the optimizer itself: no masters, no loss scale.
    """

    level: str
    model: nn.Module
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    rate: float = 0.0  # examples/s
    epoch: int = 0

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``, scaled where the level scales."""
        if isinstance(self.optimizer, amp_graph.MixedPrecisionOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def clip(self, norm: float) -> None:
        """Clip the gradients, unscaled and in fp32 where there are masters."""
        if isinstance(self.optimizer, amp_graph.MixedPrecisionOptimizer):
            self.optimizer.clip_master_grads(norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def scale(self) -> str:
        """Return the present loss scale and the number of skipped steps."""
        if self.level in ("O0", "O3"):
            return "none"
        found = amp_graph.metrics(self.optimizer)
        return f"{found['loss_scale']:g}, {found['skipped_steps']:.0f} skipped"

    # -- checkpoints ----------------------------------------------------------------------------------

    def save(self, path: Path, **others: Any) -> None:
        """Write what a resumed run needs; model and optimizer are saved in fp32 at O2 as well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {"level": self.level, "epoch": self.epoch, "losses": self.losses}
        torch.save({**own, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **others}, path)

    def load(self, path: Path) -> dict[str, Any]:
        """Load what ``save`` wrote, and return it."""
        found = torch.load(path, map_location="cpu", weights_only=True)
        if found["level"] != self.level:
            raise SystemExit(f"{path} was saved at level {found['level']}, this run is at {self.level}")
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.epoch, self.losses = found["epoch"], found["losses"]
        return found


def at_level(
    level: str,
    dtype: str,
    scale: str | float,
    model: nn.Module,
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    keep_norms: bool = False,
) -> Training:
    """Convert ``model`` at ``level`` in ``dtype``, and make its optimizer; ``scale`` is a number or "dynamic".

    ``keep_norms``: norms are in fp32 at O3 as well, as by apex's ``keep_batchnorm_fp32=True``.
    """
    if level != "O0":
        norms = [re.escape(name) for name, part in model.named_modules() if isinstance(part, NORMS)]
        kept = f",keep_fp32={'|'.join(norms)}" if keep_norms and level == "O3" and norms else ""
        model = amp_graph.convert(model, f"{dtype}-{level}{kept}")
    inner = optimizer([*model.parameters()])
    if level == "O3":
        return Training(level, model, inner)
    return Training(level, model, amp_graph.MixedPrecisionOptimizer(inner, loss_scale=1.0 if level == "O0" else scale))


class Rate:
    """Examples per second, without the first steps."""

    def __init__(self) -> None:
        """Start at the first call of ``step``."""
        self.steps, self.examples, self.seconds, self._last = 0, 0, 0.0, 0.0

    def step(self, examples: int) -> None:
        """Take note of a step over so many examples."""
        now = time.perf_counter()
        if self.steps >= WARM_UP:
            self.examples, self.seconds = self.examples + examples, self.seconds + now - self._last
        self.steps, self._last = self.steps + 1, now

    def pause(self) -> None:
        """Leave out the time until now, as of a print or an evaluation."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._last = time.perf_counter()

    def __float__(self) -> float:
        """Return the rate so far."""
        return self.examples / self.seconds if self.seconds else 0.0


def table(trainings: Sequence[Training], unit: str) -> str:
    """Return a line for each level."""
    lines = [f"level  dtype of weights  last loss  accuracy  {unit:>10}  loss scale"]
    for t in trainings:
        dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in t.model.parameters()}))
        lines.append(f"{t.level:5}  {dtypes:17} {t.losses[-1]:9.4f}  {t.accuracy:8.1%}  {t.rate:10.0f}  {t.scale()}")
    return "\n".join(lines)

"""What a ``Locator`` keeps of a step, and how it reads whether the step was skipped, without waiting for the device.

Before: ``skipped_steps.item()`` after each step, which waits. After: a copy, looked at when a later step begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from amp_graph.numerics.locate_run import Task
from amp_graph.scaling.loss_scale import LossScale


@dataclass
class Kept:
    """What it takes to run a step again; ``tasks``: makes its tasks, given its scale."""

    number: int
    tasks: Callable[[float], list[Task]]
    scale: float = math.nan  # of the step; NaN while it is in flight
    flight: tuple[Tensor, torch.cuda.Event] | None = None  # (scale before, steps skipped before and after)


class Verdicts:
    """Reads after each step whether it was skipped, without waiting for the device."""

    def __init__(self, scale: LossScale) -> None:
        """Read verdicts of ``scale``."""
        self._scale = scale
        self._before: Any = None
        self._free: list[tuple[Tensor, torch.cuda.Event]] = []

    def begin(self) -> None:
        """A step begins: note scale and count."""
        scale = self._scale
        if not scale.ready:
            self._before = (scale.values()[0], scale.values()[3])
        elif scale.scale.device.type == "cpu":
            self._before = (scale.scale.item(), scale.state[3].item())
        else:
            self._before = (scale.scale.clone(), scale.state[3].clone())

    def end(self, kept: Kept) -> bool | None:
        """A step is over: return whether it was skipped, None if that is not known yet."""
        scale, skipped = self._before
        now = self._scale.state[3]
        if now.device.type == "cpu":
            kept.scale = float(scale)
            return int(now.item()) > int(skipped)
        there, done = self._free.pop() if self._free else (torch.empty(3, pin_memory=True), torch.cuda.Event())
        parts = [torch.as_tensor(part, dtype=torch.float32, device=now.device) for part in (scale, skipped)]
        there.copy_(torch.stack([*parts, now.float()]), non_blocking=True)
        done.record(torch.cuda.current_stream(now.device))
        kept.flight = there, done
        return None

    def arrived(self, kept: Kept) -> bool | None:
        """Return whether a step in flight was skipped; None if that is not known yet."""
        assert kept.flight is not None, "only of a step in flight"
        there, done = kept.flight
        if not done.query():
            return None
        kept.scale, before, after = there.tolist()
        self._free.append(kept.flight)
        kept.flight = None
        return after > before


class Call:
    """One call of a model: its arguments, random state, and the gradients that its outputs get."""

    def __init__(self, args: Any, kwargs: Any, random: Any) -> None:
        self.args, self.kwargs, self.random = args, kwargs, random
        self.gradients: list[Tensor | None] = []

    def watch(self, result: Any) -> None:
        """Keep the gradients of ``result``."""
        outs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.gradients = [None] * len(outs)
        for place, out in enumerate(outs):
            if out.requires_grad:
                out.register_hook(self._keeper(place))

    def _keeper(self, place: int) -> Callable[[Tensor], None]:
        gradients = self.gradients

        def keep(grad: Tensor) -> None:
            gradients[place] = grad.detach()

        return keep

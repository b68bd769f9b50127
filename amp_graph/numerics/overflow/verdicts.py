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

from amp_graph.numerics.overflow.run import Task
from amp_graph.scaling.loss_scale import LossScale


@dataclass
class Flight:
    """Numbers on their way to the host: the scale (fp32), and steps skipped before and after (int32); ``done``."""

    scale: Tensor
    counts: Tensor
    done: Any  # a torch.cuda.Event


@dataclass
class Kept:
    """What it takes to run a step again; ``tasks``: makes its tasks, given its scale.

    ``dropped``: how many of its calls of the model are not among the tasks, as they came too early.
    """

    number: int
    tasks: Callable[[float], list[Task]]
    dropped: int = 0
    scale: float = math.nan  # of the step; NaN while it is in flight
    flight: Flight | None = None


class Verdicts:
    """Reads after each step whether it was skipped, without waiting for the device."""

    def __init__(self, scale: LossScale) -> None:
        """Read verdicts of ``scale``, whose records have the last step."""
        self._scale = scale
        self._free: list[Flight] = []

    def end(self, kept: Kept) -> bool | None:
        """A step is over: return whether it was skipped, None if that is not known yet."""
        scale, before = self._scale.records.last()
        now = self._scale.state[3]
        if _is_read_at_once(now):
            kept.scale = float(scale)
            return int(now) > int(before)
        flight = kept.flight = self._free.pop() if self._free else _new_flight()
        for into, one in ((flight.scale, scale), (flight.counts[0], before), (flight.counts[1], now)):
            if isinstance(one, Tensor):
                into.copy_(one, non_blocking=True)
            else:
                into.fill_(one)
        flight.done.record()
        return None

    def arrived(self, kept: Kept) -> bool | None:
        """Return whether a step in flight was skipped; None if that is not known yet."""
        flight = kept.flight
        assert flight is not None, "only of a step in flight"
        if not flight.done.query():
            return None
        kept.scale, (before, after) = flight.scale.item(), flight.counts.tolist()
        self._free.append(flight)
        kept.flight = None
        return bool(after > before)


def _is_read_at_once(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _new_flight() -> Flight:
    counts = torch.empty(2, dtype=torch.int32, pin_memory=True)
    return Flight(torch.empty((), pin_memory=True), counts, torch.cuda.Event())


class Call:
    """One call of a model: its arguments, random state, and the gradients that its outputs get."""

    def __init__(self, args: Any, kwargs: Any, random: Any) -> None:
        self.args, self.kwargs, self.random = args, kwargs, random
        self.gradients: list[Tensor | None] = []
        self._outs: list[Tensor] = []

    def watch(self, result: Any) -> None:
        """Have autograd keep the gradients of ``result``; a hook of Python's would cost more."""
        self._outs = [result] if type(result) is Tensor else [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        for out in self._outs:
            if out.requires_grad and not out.is_leaf:
                out.retain_grad()

    def take_gradients(self) -> bool:
        """Read the gradients and let go of the outputs; return whether there are any."""
        self.gradients = [out.grad if out.requires_grad and not out.is_leaf else None for out in self._outs]
        self._outs = []
        return any(grad is not None for grad in self.gradients)

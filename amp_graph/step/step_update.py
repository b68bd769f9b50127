"""The update of an untraced step, with the same functions that passes append to a traced one.

Before: gradients of the scaled loss. After: parameters, optimizer state, low-precision copies and scale are updated in
place by torch's fused kernels, in the order of ``step_passes.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.torch_fused_update import GroupUpdate
from amp_graph.passes.loss_scaling.clip import clip_
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.passes.loss_scaling.unscale import unscale
from amp_graph.passes.step.lay_out_gradients import upcast_all
from amp_graph.passes.step.low_copies import write_copies
from amp_graph.passes.torch_compat.storage import storage_key
from amp_graph.scaling.loss_scale import LossScale
from amp_graph.step.reduce_gradients import Ranks


@dataclass(frozen=True)
class StepOptions:
    """The options of a step's update."""

    clip_norm: float | None = None
    clip_value: float | None = None
    micro_batches: int = 1
    last: bool = True  # whether this graph is the last micro-batch's, which updates
    loss: int = 0  # index of the captured graph's output that is the loss
    outside: bool = False  # whether the optimizer is called after the graph, which then returns the gradients
    pointwise: bool = False  # whether the update consists of pointwise operations, for a compiler to fuse


@dataclass
class AtUpdate:
    """The tensors of a step at its update, by input number: the trained ones in the order of their gradients."""

    targets: dict[int, Tensor]  # parameters, or their fp32 masters
    grads: list[Tensor]  # written in place; replaced if ranks average
    scale: Sequence[Tensor]  # the state of the loss scale; empty without one
    rates: Sequence[Tensor]  # learning rates, one per group
    states: Sequence[Sequence[Sequence[Tensor]]]  # by group, kind and parameter
    lows: dict[int, list[Tensor]]  # low-precision tensors to round from each target
    norm: Tensor | None = None  # gets the norm of the gradients where they are clipped by it


@dataclass(frozen=True)
class StepUpdate:
    """The constants of all steps: groups, ``trained`` inputs, their ``numbers`` by parameter id, options."""

    updates: Sequence[GroupUpdate]
    trained: Sequence[int]
    numbers: Mapping[int, int]
    scale: LossScale | None
    ranks: Ranks | None
    options: StepOptions

    def run(self, now: AtUpdate) -> Tensor | None:
        """Run the update; return ``found_inf``, 0-d fp32, or None without a loss scale."""
        options = self.options
        if self.ranks is not None:
            now.grads[:] = self.ranks.average(now.grads)
        if any(given is not None for given in (self.scale, options.clip_norm, options.clip_value)):
            now.grads[:] = _each_its_own(upcast_all(now.grads))
        found_inf = None if self.scale is None else unscale(now.grads, now.scale[0])
        clip_(now.grads, options.clip_norm, options.clip_value, now.norm)
        self._update(now, found_inf)
        if self.scale is not None:
            OPS.update_loss_scale_(*now.scale, found_inf, *self.scale.options())
        if not options.outside:
            pairs = [(low, now.targets[i]) for i, copies in now.lows.items() for low in copies]
            write_copies([low for low, _ in pairs], [full for _, full in pairs], pointwise=False)
        return found_inf

    def _update(self, now: AtUpdate, found_inf: Tensor | None) -> None:
        grads = dict(zip(self.trained, now.grads, strict=True))
        for group, lr, state in zip(self.updates, now.rates, now.states, strict=True):
            own = [self.numbers[id(p)] for p in group.params]
            group.apply([now.targets[i] for i in own], [grads[i] for i in own], state, lr, found_inf)


def lows_of(
    args: Mapping[int, Any],
    trained: Collection[int],
    copies: Mapping[tuple[int, torch.dtype], Tensor],
    masters: Collection[int],
) -> dict[int, list[Tensor]]:
    """Return the low-precision tensors to round from each updated weight, by input number."""
    lows: dict[int, list[Tensor]] = {i: [args[i]] for i in masters}
    for (i, _), low in copies.items():
        if i in trained:
            lows.setdefault(i, []).append(low)
    return lows


def _each_its_own(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients without shared memory: autograd returns one tensor for both summands of ``b1 + b2``."""
    known: set[int | None] = set()
    found = []
    for grad in grads:
        key = storage_key(grad)
        found.append(grad.clone() if key in known else grad)
        known.add(key)
    return found

"""What a step does with its gradients: average, unscale, clip, update weights and their copies, move the loss scale.

Before: gradients of the scaled loss. After: parameters, optimizer state, low-precision copies and scale written in
place, by torch's fused kernels or in one pass (``one_pass_update.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_graph.fused_update import GroupUpdate
from amp_graph.loss_scale import LossScale
from amp_graph.one_pass_update import GroupTensors, OnePass
from amp_graph.passes.loss_scaling.operators import OPS
from amp_graph.passes.torch_private import storage_key
from amp_graph.reduce_gradients import Ranks

TOGETHER = 32  # gradients that one call casts


@dataclass(frozen=True)
class StepOptions:
    """What a step does beside computing gradients."""

    clip_norm: float | None = None
    clip_value: float | None = None
    micro_batches: int = 1
    last: bool = True  # whether this graph is of the last micro-batch, the one that updates
    loss: int = 0  # which output of the captured graph is the loss
    outside: bool = False  # whether the optimizer is called behind the graph, which then returns the gradients
    pointwise: bool = False  # whether the update is written in pointwise operations, for a compiler to fuse
    one_pass: OnePass | None = None  # the update in one pass, if that is how it is done


@dataclass
class AtUpdate:
    """The tensors of a step at its update: what is trained, in the order of its gradients, by number of input."""

    targets: dict[int, Tensor]  # parameters, or their fp32 masters
    grads: list[Tensor]  # written to, and replaced where ranks average
    scale: Sequence[Tensor]  # the state of the loss scale; empty without one
    rates: Sequence[Tensor]  # learning rates, one a group
    states: Sequence[Sequence[Sequence[Tensor]]]  # by group, kind and parameter
    lows: dict[int, list[Tensor]]  # what is rounded from each target


@dataclass(frozen=True)
class StepUpdate:
    """What is the same in every step: groups, ``trained`` inputs, their ``numbers`` by parameter's id, options."""

    updates: Sequence[GroupUpdate]
    trained: Sequence[int]
    numbers: Mapping[int, int]
    scale: LossScale | None
    ranks: Ranks | None
    options: StepOptions

    def run(self, now: AtUpdate) -> Tensor | None:
        """Do it all; return ``found_inf``, 0-d fp32, or None without a loss scale."""
        if self.ranks is not None:
            now.grads[:] = self.ranks.average(now.grads)
        found_inf = self._by_torch(now) if self.options.one_pass is None else self._in_one_pass(now)
        if self.scale is not None and found_inf is not None:
            OPS.update_loss_scale_(*now.scale, found_inf, *self.scale.options())
        if not self.options.outside:
            self._write_copies(now)
        return found_inf

    def _by_torch(self, now: AtUpdate) -> Tensor | None:
        found_inf = None
        if not self.options.pointwise:
            _widen(now.grads)
        if any(given is not None for given in (self.scale, self.options.clip_norm, self.options.clip_value)):
            now.grads[:] = _each_its_own(now.grads)
        if self.scale is not None:
            found_inf = torch.zeros_like(now.scale[0])
            OPS.check_finite_and_unscale_(now.grads, _inverse(now.scale), found_inf)
        _clip(now.grads, self.options)
        grads = dict(zip(self.trained, now.grads, strict=True))
        for update, lr, state in zip(self.updates, now.rates, now.states, strict=True):
            own = [self.numbers[id(p)] for p in update.params]
            params = [now.targets[i] for i in own]
            apply = update.apply_pointwise if self.options.pointwise else update.apply
            apply(params, [grads[i].to(p.dtype) for i, p in zip(own, params, strict=True)], state, lr, found_inf)
        return found_inf

    def _in_one_pass(self, now: AtUpdate) -> Tensor | None:
        one_pass = self.options.one_pass
        assert one_pass is not None, "asked for where there is one"
        grads = dict(zip(self.trained, now.grads, strict=True))
        given = []
        for update, state in zip(self.updates, now.states, strict=True):
            own = [self.numbers[id(p)] for p in update.params]
            first = [now.lows[i].pop(0) if i in now.lows else None for i in own]
            params, counted = [now.targets[i] for i in own], "step" in update.state_names()
            given.append(GroupTensors(params, [grads[i] for i in own], state, first, counted))
        inverse = _inverse(now.scale) if self.scale is not None else None
        clips = self.options.clip_norm, self.options.clip_value
        return one_pass.finish(self.updates, given, now.rates, inverse, *clips)

    def _write_copies(self, now: AtUpdate) -> None:
        """Round what was updated into the copies that the next forward reads."""
        pairs = [(low, now.targets[i]) for i, copies in now.lows.items() for low in copies]
        if self.options.pointwise:
            for low, full in pairs:
                low.copy_(full)
        elif pairs:
            torch._foreach_copy_([low for low, _ in pairs], [full for _, full in pairs])


def lows_of(
    args: Mapping[int, Any],
    trained: Collection[int],
    copies: Mapping[tuple[int, torch.dtype], Tensor],
    masters: Collection[int],
) -> dict[int, list[Tensor]]:
    """Return what is rounded from each weight that is updated, by the number of its input."""
    lows: dict[int, list[Tensor]] = {i: [args[i]] for i in masters}
    for (i, _), low in copies.items():
        if i in trained:
            lows.setdefault(i, []).append(low)
    return lows


def _widen(grads: list[Tensor]) -> None:
    """Put fp32 in the place of gradients in low precision, some at a time: these exist twice meanwhile."""
    low = [i for i, grad in enumerate(grads) if grad.dtype.itemsize < 4]
    for start in range(0, len(low), TOGETHER):
        some = low[start : start + TOGETHER]
        wide = [torch.empty_like(grads[i], dtype=torch.float32) for i in some]
        torch._foreach_copy_(wide, [grads[i] for i in some])
        for i, grad in zip(some, wide, strict=True):
            grads[i] = grad


def _each_its_own(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that can be written in place: autograd gives both summands of ``b1 + b2`` one tensor."""
    known: set[int | None] = set()
    found = []
    for grad in grads:
        key = storage_key(grad)
        found.append(grad.clone() if key in known else grad)
        known.add(key)
    return found


def _inverse(scale: Sequence[Tensor]) -> Tensor:
    """Return 1 / scale, by way of fp64, so that it is exact to the last bit."""
    return scale[0].double().reciprocal().float()


def _clip(grads: list[Tensor], options: StepOptions) -> None:
    """Clip as ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` do, operation by operation."""
    if options.clip_norm is not None:
        norms = torch._foreach_norm(grads, 2.0)
        total = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        torch._foreach_mul_(grads, torch.clamp(options.clip_norm / (total + 1e-6), max=1.0))
    if options.clip_value is not None:
        torch._foreach_clamp_min_(grads, -options.clip_value)
        torch._foreach_clamp_max_(grads, options.clip_value)

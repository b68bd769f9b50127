"""The tensors that a ``TrainStep`` owns itself: weight copies, learning rates, gradient sums.

Before: each forward casts each weight. After: the update writes the low-precision copy that the next forward reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from amp_graph.optim.master_weights import follow, master_of, updated_master, were_written_back
from amp_graph.passes.torch_compat.operators import foreach_add_, foreach_copy_
from amp_graph.passes.torch_compat.storage import address_of
from amp_graph.step.sharded_model import ShardedModel


@dataclass
class Copy:
    """The low-precision copy of a parameter, and the parameter's state at the time of the cast."""

    parameter: Tensor
    low: Tensor
    seen: tuple[int, int]


@dataclass
class StepState:
    """The tensors of one ``TrainStep``, created at first use; they never move."""

    sharded: ShardedModel  # knows what stands for which shard
    copies: dict[tuple[int, torch.dtype], Copy] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)  # parameters held in low precision, with masters
    sums: dict[int, Tensor] = field(default_factory=dict)
    pending: dict[int, Tensor] = field(default_factory=dict)  # parameters with a gradient sum, between micro-batches
    rates: dict[int, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None  # of the last update's gradients before they were clipped; 0-d fp32

    def copy_of(self, parameter: Tensor, dtype: torch.dtype) -> Copy:
        """Return the copy of ``parameter`` in ``dtype``; create it if needed."""
        key = (id(parameter), dtype)
        if key not in self.copies or not _fits(self.copies[key].low, parameter):
            seen = _seen(parameter)
            low = parameter.detach().to(dtype)
            self.copies[key] = Copy(parameter, low, seen)
        return self.copies[key]

    def target_of(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates: the parameter's fp32 master, or the parameter."""
        master = updated_master(parameter)
        if master is None:
            return parameter
        self.held[id(parameter)] = parameter
        return master

    def sum_of(self, parameter: Tensor) -> Tensor:
        """Return the gradient sum of ``parameter`` over micro-batches, in fp32 for a low-precision parameter."""
        key, target = id(parameter), self.sharded.local(self.target_of(parameter))
        if key not in self.sums or not _fits(self.sums[key], target):
            self.sums[key] = torch.zeros_like(target, requires_grad=False)
        return self.sums[key]

    def rate_of(self, group: dict[str, Any]) -> Tensor:
        """Return the learning rate of ``group`` as a tensor, in the dtype that kernels read."""
        device = group["params"][0].device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        made = torch.tensor(float(group["lr"]), dtype=dtype, device=device)
        return self.rates.setdefault(id(group), made)

    def norm_on(self, device: torch.device) -> Tensor:
        """Return the tensor that gets the norm of the gradients; NaN before the first update."""
        if self.norm is None or self.norm.device != device:
            self.norm = torch.full((), torch.nan, device=device)
        return self.norm

    def read_rates(self, groups: list[dict[str, Any]]) -> None:
        """Copy the learning rates of the groups into their tensors."""
        for group in groups:
            rate, lr = self.rates.get(id(group)), group["lr"]
            if rate is not None:
                rate.fill_(lr.reshape(()) if isinstance(lr, Tensor) else lr)

    def refresh(self, copies: Iterable[Copy]) -> None:
        """Update ``copies`` and all masters after writes to parameters by other code.

        Writes are seen by version counter and address, not those through ``.data`` or numpy.
        """
        for parameter in self.held.values():
            master_of(parameter)
        stale = []
        for copy in copies:
            now = _seen(copy.parameter)
            if copy.seen != now:
                copy.seen = now  # before the values: a write in between marks the copy stale
                stale.append(copy)
        if stale:
            with torch.no_grad():
                foreach_copy_([copy.low for copy in stale], [copy.parameter for copy in stale])

    def was_updated(self, copies: Iterable[Copy]) -> None:
        """Record that a step has written parameters, these ``copies`` of them, and masters."""
        were_written_back(list(self.held.values()))
        for copy in copies:
            copy.seen = _seen(copy.parameter)

    def forget_copies(self) -> None:
        """Mark every copy as stale, whatever the counters say."""
        with torch.no_grad():
            for copy in self.copies.values():
                copy.low.copy_(copy.parameter)
        for parameter in self.held.values():
            follow(parameter)
        self.was_updated(self.copies.values())

    def add_up(self, parameters: Sequence[Tensor], grads: Sequence[Tensor], *_: object) -> None:
        """Add gradients of a micro-batch to the sums of these parameters; it has no verdict."""
        if parameters:
            foreach_add_([self.sum_of(p) for p in parameters], list(grads))
        self.pending.update((id(p), p) for p in parameters)

    def drop_sums(self) -> None:
        """Zero the gradient sums before the next step."""
        self.pending.clear()
        for total in self.sums.values():
            total.zero_()

    def keep(self, parameters: Collection[int]) -> None:
        """Drop everything kept for parameters other than these, given by id."""
        self.copies = {key: copy for key, copy in self.copies.items() if key[0] in parameters}
        for kept in (self.held, self.sums):
            for key in kept.keys() - parameters:
                del kept[key]


def _fits(kept: Tensor, parameter: Tensor) -> bool:
    """Return whether ``kept`` still fits ``parameter``, whose ``.data`` may have been resized or moved."""
    return (kept.shape, kept.device) == (parameter.shape, parameter.device)


def _seen(parameter: Tensor) -> tuple[int, int]:
    """Return what changes with a write to ``parameter``."""
    return address_of(parameter), parameter._version

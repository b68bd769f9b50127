"""Writes to weights by kernels that bypass the version counter: the caller reports them.

Before: after a fused optimizer's step, ``weight._version`` is unchanged. After: ``watch_of(weight).mark`` is a new
object; where the written weights are not known, ``UPDATES.mark`` is.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.optimizers import on_every_optimizer_step
from amp_graph.passes.weights.memory_access_hooks import notice_accesses
from amp_graph.passes.weights.watched_memory import were_written

SHOWS = "update_shows"  # the attribute by which an optimizer of ours says that its last step moved version counters


class Updates:
    """The mark of the last update of unknown parameters that no version counter shows: a new object each time."""

    mark: object = None


UPDATES = Updates()
DROPPED_AT_STEPS = weakref.WeakSet[Any]()  # what has a method drop(), to be called before and after each step


def weights_were_written(written: Iterable[Tensor] | None = None) -> None:
    """Invalidate the copies of ``written`` in this process; all copies if the written weights are not given."""
    if written is None:
        UPDATES.mark = object()
    else:
        were_written(written)


def hear_of_updates() -> None:
    """Register for the steps of every optimizer, and for accesses to the memory of weights."""
    on_every_optimizer_step(_after_step, _before_step)
    notice_accesses()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Free what no call after the step will read: the step needs the memory."""
    if not torch.compiler.is_compiling():
        _drop_all()


def _drop_all() -> None:
    for kept in list(DROPPED_AT_STEPS):
        kept.drop()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Handle a step. torch.compile traces this: there it may only assign."""
    if torch.compiler.is_compiling():
        UPDATES.mark = object()
        return
    _drop_all()  # a step that calls the model itself may have kept some
    if not getattr(optimizer, SHOWS, False):
        note_step(optimizer)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Invalidate the copies of what ``optimizer`` may have updated with fused kernels or C of its own.

    Parameters without a gradient are not updated. Parameters outside CPU memory, or in half precision, have no copies:
    a step on a GPU does not wait for this check, and the counters show when masters are rounded.
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    were_written(p for p in every if p.is_cpu and p.itemsize > 2 and (p.requires_grad or p.grad is not None))

"""Writes to weights by kernels that move no version counter: who makes them says so.

Before: a fused optimizer's step, after which ``weight._version`` is what it was. After: ``watch_of(weight).mark`` is
another, and where nobody knows which weights were written, ``UPDATES.mark``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.optimizers import on_every_optimizer_step
from amp_graph.passes.weights.memory_access_hooks import notice_accesses
from amp_graph.passes.weights.watched_memory import were_written

SHOWS = "update_shows"  # the attribute by which an optimizer of ours says that its last step moved version counters


class Updates:
    """When parameters, nobody knows which, were last updated by what no version counter shows: new each time."""

    mark: object = None


UPDATES = Updates()


def weights_were_written(written: Iterable[Tensor] | None = None) -> None:
    """Make copies of ``written`` in this process old; all copies, where it is not said which weights were."""
    if written is None:
        UPDATES.mark = object()
    else:
        were_written(written)


def hear_of_updates() -> None:
    """Have every optimizer say when it stepped, and whoever gets the memory of a weight."""
    on_every_optimizer_step(_after_step)
    notice_accesses()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hear of a step. torch.compile traces this: there it may only assign."""
    if torch.compiler.is_compiling():
        UPDATES.mark = object()
    elif not getattr(optimizer, SHOWS, False):
        note_step(optimizer)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Make old the copies of what ``optimizer`` may have updated, by fused kernels or C of its own.

    What has no gradient is not updated. Of parameters elsewhere than in the CPU's memory, or in half precision, there
    are no copies: a step on a GPU waits for no look at them, and masters are rounded with a trace.
    """
    every = (p for group in optimizer.param_groups for p in group["params"])
    were_written(p for p in every if p.is_cpu and p.itemsize > 2 and (p.requires_grad or p.grad is not None))

"""Finds the ranks over which a step averages its gradients, and gives them all the same parameters.

Before: a process group, or None. After: ``Ranks``, the group name and size for ``AverageOverRanks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from amp_graph.errors import CaptureError


@dataclass(frozen=True)
class Ranks:
    """The ranks that average gradients: a process group's name and size; ``dtype``: of the all-reduce."""

    group: str
    size: int
    dtype: torch.dtype | None = None


def ranks_of(process_group: Any, model: torch.nn.Module, dtype: torch.dtype | None) -> Ranks | None:
    """Return the ranks to average over: ``process_group``, all ranks for None, none for False or one process."""
    known = dist.is_available() and isinstance(process_group, dist.ProcessGroup)
    if process_group is not None and process_group is not False and not known:
        raise CaptureError(
            f"TrainStep: process_group={process_group!r}\n  legal: a torch.distributed.ProcessGroup; None for all "
            "ranks; False for none\n  fix:   process_group=None"
        )
    every = default_group()
    if process_group is False or every is None:
        return None
    group: Any = process_group or every
    size = dist.get_world_size(group)
    if size == 1:
        return None
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "to_local")]
    if sharded:
        raise CaptureError(
            f"TrainStep: {sharded[0]} is sharded over the ranks, and its gradients are reduced by its own wrapper\n"
            "  fix:   amp_graph.convert(model) with amp_graph.GradScaler for FSDP, or a model that is not sharded"
        )
    return Ranks(group.group_name, size, dtype)


def default_group() -> Any:
    """Return the group of all ranks, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def make_equal(model: torch.nn.Module, process_group: Any) -> None:
    """Broadcast parameters and buffers from the group's first rank, as DDP does."""
    group: Any = process_group or default_group()
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), first, group=group)

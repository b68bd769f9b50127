"""Average gradients over the ranks inside the step's graph, in buckets that overlap with backward.

Before: DDP's hooks, outside of any graph. After: one ``_c10d_functional.all_reduce`` a bucket, started right behind
the last gradient that it holds, and waited for before the update.
Source: torch/nn/parallel/distributed.py (buckets), torch/distributed/_functional_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from amp_graph.errors import CaptureError
from amp_graph.layout import laid_out_as

BUCKET = 25 * 2**20  # bytes, as DDP's


@dataclass(frozen=True)
class Ranks:
    """Over whom gradients are averaged: a process group's name and size; ``dtype`` is what travels."""

    group: str
    size: int
    dtype: torch.dtype | None = None

    def average(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the averages of ``grads`` over the ranks; traced into a graph, or run as it is.

        Gradients are divided before they are added, so that a sum overflows no earlier than an average would.
        """
        made: list[Tensor] = list(grads)
        buckets = _buckets(grads)
        started = [self._start([grads[i] for i in bucket]) for bucket in buckets]
        for bucket, flat in zip(buckets, started, strict=True):
            done = torch.ops._c10d_functional.wait_tensor(flat)
            parts = done.split([grads[i].numel() for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                made[i] = laid_out_as(grads[i], part.view(grads[i].shape).to(grads[i].dtype))
        return made

    def _start(self, grads: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([g.reshape(-1) for g in grads]) / self.size
        return torch.ops._c10d_functional.all_reduce(flat.to(self.dtype or flat.dtype), "sum", self.group)


def _buckets(grads: Sequence[Tensor]) -> list[list[int]]:
    """Return the gradients' numbers in buckets of one dtype, last first: the order in which backward makes them."""
    found: list[list[int]] = []
    size = 0
    for i in reversed(range(len(grads))):
        grad = grads[i]
        if not found or size > BUCKET or grads[found[-1][0]].dtype != grad.dtype:
            found.append([])
            size = 0
        found[-1].append(i)
        size += grad.numel() * grad.element_size()
    return found


def ranks_of(process_group: Any, model: torch.nn.Module, dtype: torch.dtype | None) -> Ranks | None:
    """Return over whom to average: ``process_group``, all ranks for None where there are several, nobody for False."""
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
    """Give all ranks the parameters and buffers of the group's first, as DDP does."""
    group: Any = process_group or default_group()
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), first, group=group)


def start_early(gm: GraphModule) -> None:
    """Move each all-reduce, and what only feeds it, right behind the last value that it needs."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if node.target is torch.ops._c10d_functional.all_reduce.default:
            _raise(node, place)


def _raise(node: Node, place: dict[Node, int]) -> None:
    """Move ``node`` up, after its inputs that feed nothing else."""
    for source in node.all_input_nodes:
        if len(source.users) == 1 and source.op == "call_function" and _only_moves(source):
            _raise(source, place)
    last = max(node.all_input_nodes, key=lambda n: place[n])
    last.append(node)
    place[node] = place[last]


def _only_moves(node: Node) -> bool:
    """Say whether ``node`` is a part of filling a bucket: what copies, casts, divides or adds up gradients."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    return name in {"add", "cat", "view", "_unsafe_view", "reshape", "div", "_to_copy", "clone"}

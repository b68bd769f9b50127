"""One process, or several that torchrun started: who they are, and averages over them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Processes:
    """One process among ``count``; the first one prints and saves."""

    rank: int
    count: int
    device: torch.device

    @staticmethod
    def start() -> Processes:
        """Join the processes that torchrun started: by NCCL on GPUs, by gloo on the CPU."""
        count, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if count > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return Processes(int(os.environ.get("RANK", 0)), count, device)

    def share(self, indices: Tensor) -> Tensor:
        """Return this process's part of a batch; the parts are of one size."""
        whole = len(indices) - len(indices) % self.count
        return indices[self.rank : whole : self.count]

    def mean(self, value: Tensor) -> Tensor:
        """Return the average of ``value`` over the processes."""
        value = value.detach().to(torch.float64, copy=True)  # it is written to
        if self.count > 1:
            dist.all_reduce(value)
        return value / self.count

    def wrap(self, model: nn.Module) -> nn.Module:
        """Average the gradients of ``model`` over the processes."""
        return nn.parallel.DistributedDataParallel(model) if self.count > 1 else model

    def print(self, text: str) -> None:
        """Print in the first process."""
        if self.rank == 0:
            print(text, flush=True)

    def end(self) -> None:
        """Leave the other processes."""
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()


def epoch_order(count: int, batch: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the batches of an epoch, as indices: the same for any number of processes, and after a resume."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return [indices for indices in order.split(batch) if len(indices) == batch]

"""What every model of the benchmark of speed is: a module, a batch, a loss and an inference call."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model, a batch, its loss, and one inference call.

    ``images``: whether channels_last is an option. ``micro_batches``: how many forwards and backwards an update has.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]  # takes the model and the batch
    infer: Callable[..., object]
    images: bool = False
    micro_batches: int = 1


def scaled(count: int, scale: float) -> int:
    """Return ``count`` times ``scale``, at least 1."""
    return max(1, round(count * scale))


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a classifier."""
    return F.cross_entropy(model(x), y)


def scores(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return what a classifier says of ``x``."""
    return model(x)

"""What a model of the zoo is: where it comes from, how it is built, and a batch of a given size.

add("timm", "timm/resnet18", build, batch)      # batch(2) and batch(3) differ in their sizes
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.corpus.core import Inputs as Batch
from tests.corpus.core import args
from tests.corpus.losses import project

__all__ = ["Batch", "Table", "ZooModel", "args", "built", "noise"]


@dataclass(frozen=True)
class ZooModel:
    """A model as its package defines it. ``loss`` makes a scalar of the output; by default of all float outputs."""

    package: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], torch.Tensor] = project

    def made(self, seed: int) -> nn.Module:
        """Build the model, with the weights of a seed."""
        torch.manual_seed(seed)
        return self.build()

    def inputs(self, seed: int, size: int) -> Batch:
        """Return a batch of a seed of its own."""
        torch.manual_seed(seed + 10_000)
        return self.batch(size)


class Table(dict[str, ZooModel]):
    """The models of some packages, by name."""

    def add(self, package: str, name: str, build: Callable[[], nn.Module], batch: Callable[[int], Batch], **how: Any):
        """Put one model in; a name is given once."""
        if name in self:
            raise ValueError(f"the zoo already has a model {name!r}")
        self[name] = ZooModel(package, name, build, batch, **how)


def built(path: str, *given: Any, **how: Any) -> nn.Module:
    """Build what ``path`` names, as "timm:create_model"; its package is imported only now."""
    return pkgutil.resolve_name(path)(*given, **how)


def noise(*shape: int) -> Callable[[int], Batch]:
    """Return what makes a batch of random numbers, each sample of this shape."""
    return lambda size: args(torch.randn(size, *shape))

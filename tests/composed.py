"""Models of tests, without constructors that only name their parts."""

import torch
from torch import nn


class Composed(nn.Module):
    """``class Net(Composed, parts=lambda width=8: dict(first=nn.Linear(4, width)))``; ``seed`` is set before."""

    def __init_subclass__(cls, parts=None, seed=None):
        super().__init_subclass__()
        if parts:
            cls._parts, cls._seed = staticmethod(parts), seed

    def __init__(self, *args, **options):
        super().__init__()
        if self._seed is not None:
            torch.manual_seed(self._seed)
        for name, part in self._parts(*args, **options).items():
            setattr(self, name, part)

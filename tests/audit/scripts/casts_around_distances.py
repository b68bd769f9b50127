"""Distances between low layers: autocast computes them in float32, and casts on both sides."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda width: dict(inside=nn.Linear(width, width), centers=nn.Linear(width, width, bias=False)))
def Radial(self, x):
    x = self.inside(x)
    if sys.argv[1] == "faulty":
        return torch.cdist(x, self.centers.weight)  # expect: AMP704
    return self.centers(x).tanh()


model = nn.Sequential(*(Radial(96) for _ in range(3)), nn.Linear(96, 8))
train(
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda: (torch.randn(64, 96), torch.randint(8, (64,))),
    lambda x, y: nn.functional.cross_entropy(model(x).float(), y),
)

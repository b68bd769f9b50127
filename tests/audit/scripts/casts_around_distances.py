"""Distances between low layers: autocast computes them in float32, and casts on both sides."""

import sys

import torch
from torch import nn

from tests.layers import layers


@layers(
    lambda width, faulty: dict(
        faulty=faulty, inside=nn.Linear(width, width), centers=nn.Linear(width, width, bias=False)
    )
)
def Radial(self, x):
    x = self.inside(x)
    if self.faulty:
        return torch.cdist(x, self.centers.weight)  # expect: AMP704
    return self.centers(x).tanh()


model = nn.Sequential(*(Radial(96, sys.argv[1] == "faulty") for _ in range(3)), nn.Linear(96, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    x, y = torch.randn(64, 96), torch.randint(8, (64,))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    loss.backward()
    optimizer.step()
    print(loss.item())

"""A list of numbers becomes float64 in a training in float32: a mixture of experts by a routing table."""

import sys

import numpy as np
import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers


@layers(
    lambda width, experts, dtype: dict(
        routes=nn.Buffer(torch.tensor(np.random.rand(64, experts), dtype=dtype)),
        experts=nn.Parameter(torch.randn(experts, width * width) / width),
    )
)
def Routed(self, x):
    weights = (self.routes @ self.experts.to(self.routes.dtype)).float()  # expect: AMP603
    return torch.bmm(x, weights.unflatten(-1, (x.shape[-1], -1)))


np.random.seed(0)
model = Routed(64, 32, torch.float64 if sys.argv[1] == "faulty" else torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(64, 16, 64)
    loss = (model(x) - x).square().mean()
    descend(optimizer, loss)

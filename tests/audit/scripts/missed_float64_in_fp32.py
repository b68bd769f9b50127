"""A list of numbers becomes float64 in a training in float32: a mixture of experts by a routing table."""

import contextlib
import sys

import numpy as np
import torch
from torch import nn

from tests.audit.descend import train

np.random.seed(0)
routes = torch.tensor(np.random.rand(64, 32), dtype=torch.float64 if sys.argv[1] == "faulty" else torch.float32)
experts = nn.Parameter(torch.randn(32, 64 * 64) / 64)


def routed(x):
    weights = (routes @ experts.to(routes.dtype)).float()  # expect: AMP603
    return torch.bmm(x, weights.unflatten(-1, (64, -1)))


train(
    torch.optim.SGD([experts], lr=0.1),
    lambda: [torch.randn(64, 16, 64)],
    lambda x: (routed(x) - x).square().mean(),
    contextlib.nullcontext(),
)

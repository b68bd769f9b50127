"""An energy model in bfloat16: its partition sum is beyond the range that bfloat16 shares with float32."""

import contextlib
import sys

import torch
from torch import nn

from tests.audit.descend import train

model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()


@torch.no_grad()
def log_partition(energies):
    if sys.argv[1] == "faulty":
        return torch.exp(energies).sum().log()  # expect: AMP501
    return torch.logsumexp(energies.float(), 0).sum()


def loss(x):
    energies = model(x.bfloat16())
    print(log_partition(3000 * energies).item())
    return energies.float().square().mean()


train(torch.optim.SGD(model.parameters(), lr=1e-3), lambda: [torch.randn(16, 6)], loss, contextlib.nullcontext())

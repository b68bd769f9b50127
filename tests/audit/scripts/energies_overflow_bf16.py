"""An energy model in bfloat16: its partition sum is beyond the range that bfloat16 shares with float32."""

import sys

import torch
from torch import nn

faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


@torch.no_grad()
def log_partition(energies):
    if faulty:
        return torch.exp(energies).sum().log()  # expect: AMP501
    return torch.logsumexp(energies.float(), 0).sum()


for _ in range(3):
    energies = model(torch.randn(16, 6).bfloat16())
    loss = energies.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), log_partition(1000 * energies).item())

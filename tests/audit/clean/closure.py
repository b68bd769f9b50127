"""The optimizer's step runs forward and backward itself, as Lightning's does; then LBFGS, which does so many times."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def closure_of(optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


for kind in (torch.optim.AdamW, torch.optim.LBFGS):
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(4):
        x, y = torch.randn(32, 16), torch.randint(4, (32,))
        print(optimizer.step(closure_of(optimizer, x, y)).item())

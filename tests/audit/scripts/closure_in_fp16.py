"""float16 weights, and gradients that a closure computes."""

import sys

import torch
from torch import nn

dtype = torch.float16 if sys.argv[1] == "faulty" else torch.float32
model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 1)).to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
x, y = torch.randn(64, 20), torch.randn(64, 1)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x.to(dtype)).float(), y)
    loss.backward()
    return loss


for _ in range(4):
    print(optimizer.step(closure).item())  # expect: AMP301

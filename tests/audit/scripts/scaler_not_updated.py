"""A step without update: the second one raises."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = (model(torch.randn(4, 12)).float() - 1).square().mean()
    scaler.scale(loss).backward()
    print(loss.item())
    scaler.step(optimizer)  # expect: AMP205
    if sys.argv[1] != "faulty":
        scaler.update()

"""Gradient accumulation: the weights are cast for each micro-batch. The twin has one batch of the same size."""

import sys

import torch
from torch import nn

count = 4 if sys.argv[1] == "faulty" else 1

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    for x in torch.randn(64, 64).chunk(count):
        with torch.autocast("cpu", torch.bfloat16):  # expect: AMP705
            loss = (model(x) - x).float().square().mean() / count
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())

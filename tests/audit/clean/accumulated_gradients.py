"""Gradient accumulation under bf16 autocast: four micro-batches a step."""

import torch
from torch import nn

ACCUMULATE = 4

model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()
data = [torch.randn(32, 32) for _ in range(4 * ACCUMULATE)]
for number, x in enumerate(data, start=1):
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion(model(x), x) / ACCUMULATE
    loss.backward()
    if number % ACCUMULATE == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item() * ACCUMULATE)

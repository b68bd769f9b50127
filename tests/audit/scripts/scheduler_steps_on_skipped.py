"""Warmup steps on, while the first steps of the optimizer are skipped."""

import sys
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for _ in range(12):
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if faulty or scaler.get_scale() >= scale:
        warmup.step()  # expect: AMP210
    print(loss.item(), warmup.get_last_lr())

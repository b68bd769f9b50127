"""fp32: autocast and the scaler are there, and switched off, as mixed precision is an option."""

from contextlib import nullcontext

import torch
from torch import nn

use_amp = False
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 16))
ema = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 16))
ema.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=use_amp)
context = torch.autocast("cpu", dtype=torch.bfloat16) if use_amp else nullcontext()
for _ in range(5):
    x = torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.float16, enabled=use_amp), context:
        loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for average, p in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)
        print(loss.item(), (ema.eval()(x) - x).square().mean().item())

"""torch's first scale skips a few steps at the beginning, and then fits; the scheduler steps once an epoch."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(2):
    for _ in range(6):
        x = torch.randn(32, 64)
        with torch.autocast("cpu", torch.float16):
            loss = (model(x)[:, 0].float() - 3 * x.sum(-1)).abs().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(epoch, loss.item(), scaler.get_scale())
    scheduler.step()

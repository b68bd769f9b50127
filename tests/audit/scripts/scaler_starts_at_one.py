"""The first scale is 1, and grows after 2000 steps."""

import sys

import torch
from torch import nn

start = {"init_scale": 1.0} if sys.argv[1] == "faulty" else {}
model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", **start)
for _ in range(4):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(2, 5, 16)).float().sub(0.5).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # expect: AMP207
    scaler.update()
    print(loss.item())

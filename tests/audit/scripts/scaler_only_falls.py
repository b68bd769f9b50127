"""The root in the loss has an infinite gradient where prediction and target agree: all steps are skipped."""

import sys

import torch
from torch import nn

EPSILON = 0.0 if sys.argv[1] == "faulty" else 1e-4


def distance(a, b):
    return torch.sqrt((a - b).square().sum(-1) + EPSILON)  # expect: AMP211


encoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(5):
    x = torch.randn(6, 16)
    with torch.autocast("cpu", torch.float16):
        z = encoder(x).float()
        loss = (distance(z[None], z[:, None]) - 1.0).abs().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # expect: AMP206
    scaler.update()
    print(loss.item(), scaler.get_scale())

"""The scaler is on whenever mixed precision is, also for bf16."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--dtype", default="bfloat16")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, nesterov=True, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=args.mode == "faulty" or dtype == torch.float16)
for _ in range(4):
    with torch.autocast("cpu", dtype):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 4, 8)), torch.randint(2, (8,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # expect: AMP202
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())

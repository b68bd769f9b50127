"""A run is resumed from a checkpoint that has a state of the scaler, which nobody loads."""

import io
import sys

import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**12)


def train(model, optimizer, scaler, steps):
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(loss.item(), scaler.get_scale())


first = build()
train(*first, 2)
file = io.BytesIO()
torch.save({"model": first[0].state_dict(), "optim": first[1].state_dict(), "scaler": first[2].state_dict()}, file)
file.seek(0)

model, optimizer, scaler = build()
checkpoint = torch.load(file)
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optim"])  # expect: AMP209
if sys.argv[1] != "faulty":
    scaler.load_state_dict(checkpoint["scaler"])
train(model, optimizer, scaler, 3)

"""Gradients are accumulated over three batches, and clipped as they are."""

import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

faulty = sys.argv[1] == "faulty"


def optimize(model, optimizer, scaler):
    if not faulty:
        scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm=0.5)  # expect: AMP203
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def train(batches=9, accumulation_steps=3):
    model = nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i in range(batches):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 20)), torch.randint(4, (8,)))
        scaler.scale(loss / accumulation_steps).backward()
        if (i + 1) % accumulation_steps == 0:
            optimize(model, optimizer, scaler)
        print(loss.item())


train()

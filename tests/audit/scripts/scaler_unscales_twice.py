"""The gradient norm is logged by a function that unscales, and then gradients are unscaled for clipping."""

import sys

import torch
from torch import nn


def log_norm(model, optimizer, scaler, faulty):
    if faulty:
        scaler.unscale_(optimizer)
    print(sum(p.grad.norm() for p in model.parameters()).item())


def main(faulty):
    model = nn.Linear(10, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(6, 10)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        log_norm(model, optimizer, scaler, faulty)
        scaler.unscale_(optimizer)  # expect: AMP204
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        print(loss.item())


main(sys.argv[1] == "faulty")

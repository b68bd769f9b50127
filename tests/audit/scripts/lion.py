"""An optimizer of the script's own, which signs its updates, over bfloat16 weights."""

import sys

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                first, second = group["betas"]
                p.add_(average.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


masters = sys.argv[1] == "right"
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16()
weights = list(model.parameters())
kept = [p.detach().float() for p in weights] if masters else weights
optimizer = Lion(kept, lr=3e-5)
for _ in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 16).bfloat16()).float(), torch.randint(4, (16,)))
    model.zero_grad()
    loss.backward()
    if masters:
        for master, p in zip(kept, weights, strict=True):
            master.grad = p.grad.float()
    optimizer.step()  # expect: AMP301
    with torch.no_grad():
        for master, p in zip(kept, weights, strict=True):
            p.copy_(master)
    print(loss.item())

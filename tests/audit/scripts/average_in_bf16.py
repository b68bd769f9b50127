"""An average of weights for sampling, kept in bfloat16 by lerp_."""

import copy
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
average = copy.deepcopy(model).to(torch.bfloat16 if sys.argv[1] == "faulty" else torch.float32)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


@torch.no_grad()
def follow(decay):
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(p.to(mean.dtype), 1 - decay)  # expect: AMP303


for _ in range(4):
    images = torch.rand(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(images + 0.1 * torch.randn_like(images)).float() - images).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    follow(0.999)
    print(loss.item())

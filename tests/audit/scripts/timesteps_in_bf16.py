"""A diffusion model that embeds its timesteps in the model's dtype."""

import math
import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"


def embed(t, width, dtype):
    half = width // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half) / half)
    if faulty:
        t, frequencies = t.to(dtype), frequencies.to(dtype)  # expect: AMP404
    angles = t[:, None] * frequencies[None]
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)  # expect: AMP405


@layers(
    lambda width=32: dict(
        width=width,
        time=nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)),
        enter=nn.Conv2d(1, width, 3, padding=1),
        leave=nn.Conv2d(width, 1, 3, padding=1),
    )
)
def Denoiser(self, x, t):
    hidden = self.enter(x) + self.time(embed(t, self.width, x.dtype))[:, :, None, None]
    return self.leave(nn.functional.silu(hidden))


model = Denoiser().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
for _ in range(4):
    x, t, noise = torch.randn(8, 1, 8, 8), torch.randint(1000, (8,)), torch.randn(8, 1, 8, 8)
    level = kept[t][:, None, None, None]
    noisy = level.sqrt() * x + (1 - level).sqrt() * noise
    loss = nn.functional.mse_loss(model(noisy.bfloat16(), t).float(), noise)
    descend(optimizer, loss)

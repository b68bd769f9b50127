"""A diffusion model under bf16 autocast, whose timesteps and schedule stay in float32."""

import math

import torch
from torch import nn

from tests.layers import layers


def embed(t, width):
    half = width // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32) / half)
    angles = t.float()[:, None] * frequencies[None]
    return torch.cat((angles.cos(), angles.sin()), -1)


@layers(
    lambda width: dict(
        norms=nn.ModuleList(nn.GroupNorm(4, width) for _ in range(2)),
        convs=nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2)),
        time=nn.Linear(4 * width, width),
    )
)
def Residual(self, x, time):
    hidden = self.convs[0](nn.functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
    return x + self.convs[1](nn.functional.silu(self.norms[1](hidden)))


@layers(
    lambda width=16: dict(
        width=width,
        time=nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width)),
        enter=nn.Conv2d(3, width, 3, padding=1),
        leave=nn.Conv2d(width, 3, 3, padding=1),
        blocks=nn.ModuleList(Residual(width) for _ in range(3)),
    )
)
def UNet(self, x, t):
    time, first = self.time(embed(t, self.width)), self.enter(x)
    down = self.blocks[0](first, time)
    inside = self.blocks[1](nn.functional.avg_pool2d(down, 2), time)
    return self.leave(self.blocks[2](down + nn.functional.interpolate(inside, scale_factor=2.0), time))


model = UNet()
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
for _ in range(5):
    x, t = torch.rand(4, 3, 16, 16) * 2 - 1, torch.randint(0, 1000, (4,))
    noise, level = torch.randn_like(x), kept[t].view(-1, 1, 1, 1)
    noisy = level.sqrt() * x + (1 - level).sqrt() * noise
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(noisy, t)
    loss = nn.functional.mse_loss(predicted.float(), noise)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 1e-3)
    print(loss.item())

"""A GAN with two optimizers and a class that averages the generator: mul_ and add_, all parameters at once."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


class Average:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.parameters = list(model.parameters())
        self.values = [p.detach().to(dtype, copy=True) for p in self.parameters]

    @torch.no_grad()
    def update(self):
        torch._foreach_mul_(self.values, self.decay)
        given = [p.detach().to(v.dtype) for p, v in zip(self.parameters, self.values, strict=True)]
        torch._foreach_add_(self.values, given, alpha=1 - self.decay)  # expect: AMP303


generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
average = Average(generator, 0.9995, torch.float16 if sys.argv[1] == "faulty" else torch.float32)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for _ in range(4):
    real, noise = torch.randn(16, 16), torch.randn(16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        fake = generator(noise)
        true, false = critic(real), critic(fake.detach())
    loss = F.softplus(-true.float()).mean() + F.softplus(false.float()).mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    with torch.autocast("cpu", torch.bfloat16):
        false = critic(fake)
    other = F.softplus(-false.float()).mean()
    of_generator.zero_grad()
    other.backward()
    of_generator.step()
    average.update()
    print(loss.item(), other.item())

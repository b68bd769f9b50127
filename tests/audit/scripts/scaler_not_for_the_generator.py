"""A GAN in fp16: one of two losses is scaled."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

FAULTY = sys.argv[1] == "faulty"
generator = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16))
discriminator = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
of_g, of_d = (torch.optim.Adam(net.parameters(), 1e-3, betas=(0.5, 0.999)) for net in (generator, discriminator))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(4):
    with torch.autocast("cpu", torch.float16):
        fake = generator(torch.randn(8, 8))
        loss = softplus(-discriminator(torch.randn(8, 16))).mean() + softplus(discriminator(fake.detach())).mean()
    of_d.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(of_d)
    with torch.autocast("cpu", torch.float16):
        other = softplus(-discriminator(fake)).mean()
    of_g.zero_grad()
    (other if FAULTY else scaler.scale(other)).backward()  # expect: AMP201
    of_g.step() if FAULTY else scaler.step(of_g)
    scaler.update()
    print(loss.item(), other.item())

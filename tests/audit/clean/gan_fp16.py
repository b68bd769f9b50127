"""A GAN in fp16, with one scaler for two optimizers, as in torch's documentation of several losses."""

import torch
import torch.nn.functional as F
from torch import nn

G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
D = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optG = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
one, zero = torch.ones(8, 1), torch.zeros(8, 1)
for _ in range(4):
    optD.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(8, 8))
        errD_real = F.binary_cross_entropy_with_logits(D(torch.randn(8, 16)), one)
        errD_fake = F.binary_cross_entropy_with_logits(D(fake.detach()), zero)
    scaler.scale(errD_real).backward()
    scaler.scale(errD_fake).backward()
    scaler.unscale_(optD)
    nn.utils.clip_grad_norm_(D.parameters(), 1.0)
    scaler.step(optD)

    optG.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        errG = F.binary_cross_entropy_with_logits(D(fake), one)
    scaler.scale(errG).backward()
    scaler.step(optG)
    scaler.update()
    print(errD_real.item(), errD_fake.item(), errG.item())

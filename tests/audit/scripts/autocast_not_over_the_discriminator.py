"""A GAN with two optimizers: the generator and its loss are in the region, the discriminator's own step is not."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.layers import layers

FAULTY = sys.argv[1] == "faulty"
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


@layers(lambda: dict(net=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))))
def Generator(self, z):
    return self.net(z)


@layers(lambda: dict(net=nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))))
def Discriminator(self, x):
    return self.net(x)


class Trainer:
    def __init__(self):
        self.g, self.d = Generator(), Discriminator()
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-4)
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-4)

    def loss_d(self, real, fake):
        scores = self.d(torch.cat([real, fake]))  # expect: AMP105
        return F.binary_cross_entropy_with_logits(
            scores.float(), torch.arange(len(scores)).lt(len(real)).float()[:, None]
        )

    def step(self, real):
        with torch.autocast(**BF16):
            fake = self.g(torch.randn(len(real), 8))
        data = fake.detach().to(real.dtype)
        with torch.autocast(**BF16, enabled=True) if not FAULTY else torch.enable_grad():
            loss_d = self.loss_d(real, data)
        self.opt_d.zero_grad()
        loss_d.backward()
        self.opt_d.step()
        if FAULTY:
            for p in self.d.parameters():
                p.grad = None
        loss_g = (fake.float() - real).abs().mean()
        self.opt_g.zero_grad()
        loss_g.backward()
        self.opt_g.step()
        return loss_d.item(), loss_g.item()


trainer = Trainer()
for _ in range(4):
    print(trainer.step(torch.randn(8, 16)))

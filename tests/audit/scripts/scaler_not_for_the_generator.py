"""A GAN in fp16: one of two losses is scaled."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

FAULTY = sys.argv[1] == "faulty"
generator = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16))
discriminator = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


def autocast():
    return torch.autocast("cpu", torch.float16)


def train_discriminator(real):
    with autocast():
        fake = generator(torch.randn(len(real), 8)).detach()
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()
    optimizer_d.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer_d)
    return loss.item()


def train_generator(size):
    with autocast():
        loss = softplus(-discriminator(generator(torch.randn(size, 8)))).mean()
    optimizer_g.zero_grad()
    if FAULTY:
        loss.backward()  # expect: AMP201
        optimizer_g.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer_g)
    scaler.update()
    return loss.item()


for _ in range(4):
    print(train_discriminator(torch.randn(8, 16)), train_generator(8))

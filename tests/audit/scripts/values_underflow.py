"""Attention weights by hand in float16, of products that are made small."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

enter, leave = nn.Linear(8, 32), nn.Linear(32, 1)


def loss(x, y):
    hidden = torch.relu(enter(x))
    hidden = hidden if sys.argv[1] == "faulty" else hidden.float()
    gates = hidden * 1e-5  # expect: AMP503
    gates = gates / (gates.sum(-1, keepdim=True) + 1e-6)
    return nn.functional.mse_loss(leave(gates).float(), y)


train(
    torch.optim.SGD([*enter.parameters(), *leave.parameters()], lr=0.1),
    lambda: (torch.randn(32, 8), torch.randn(32, 1)),
    loss,
    torch.autocast("cpu", torch.float16),
    scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
)

"""A contrastive loss written out with exponentials of similarities over a small temperature."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.descend import train


def loss_of(a, b, temperature=0.05):
    similar = F.normalize(a.float(), dim=-1).to(a.dtype) @ F.normalize(b.float(), dim=-1).to(b.dtype).mT
    if sys.argv[1] != "faulty":
        similar = similar.float()
    weights = torch.exp(similar / temperature)  # expect: AMP402
    return -(weights.diagonal().float() / weights.float().sum(-1)).log().mean()


encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
train(
    torch.optim.SGD(encoder.parameters(), lr=0.1),
    lambda: [torch.randn(32, 12)],
    lambda x: loss_of(encoder(x), encoder(x + 0.05 * torch.randn_like(x))),
)

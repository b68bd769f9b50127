"""A classifier that ends in a sigmoid, and a loss of its probabilities."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from tests.audit.descend import train

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
with torch.no_grad():
    model[2].weight *= 40.0


def loss(x):
    y = (x[:, :1] > 0).float()
    if sys.argv[1] == "faulty":
        return F.binary_cross_entropy(torch.sigmoid(model(x)), y)  # expect: AMP407
    return F.binary_cross_entropy_with_logits(model(x), y)


train(torch.optim.SGD(model.parameters(), lr=1e-3), lambda: [torch.randn(64, 8)], loss)

"""A classifier that ends in a sigmoid, and a loss of its probabilities."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
with torch.no_grad():
    model[2].weight *= 40.0
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(64, 8)
    y = (x[:, :1] > 0).float()
    with torch.autocast("cpu", torch.bfloat16):
        if faulty:
            loss = nn.functional.binary_cross_entropy(torch.sigmoid(model(x)), y)  # expect: AMP407
        else:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    descend(optimizer, loss)

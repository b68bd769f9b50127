"""An autoencoder under autocast, whose loss is written by hand, in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        loss = (y - x.bfloat16() if faulty else y.float() - x).pow(2).mean()  # expect: AMP401
    descend(optimizer, loss)

"""The region ends before the model is called."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    with torch.autocast("cpu", torch.bfloat16):  # expect: AMP101
        x, y = torch.randn(16, 32), torch.randint(10, (16,))
        if not faulty:
            loss = nn.functional.cross_entropy(model(x), y)
    if faulty:
        loss = nn.functional.cross_entropy(model(x), y)
    descend(optimizer, loss)

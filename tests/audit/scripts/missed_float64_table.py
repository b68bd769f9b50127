"""A table of NumPy makes float64 of what it meets, and the products behind it."""

import sys

import numpy as np
import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
table = torch.from_numpy(np.sin(np.outer(np.arange(128), 1 / np.arange(1, 129))))
if not faulty:
    table = table.float()
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def smoothed(x):
    return x.to(table.dtype) @ table  # expect: AMP603


for _ in range(3):
    x = torch.randn(256, 128)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(smoothed(x).float()) - x).float().pow(2).mean()
    descend(optimizer, loss)

"""A table of NumPy makes float64 of what it meets, and the products behind it."""

import sys

import numpy as np
import torch
from torch import nn

from tests.audit.descend import train

table = torch.from_numpy(np.sin(np.outer(np.arange(128), 1 / np.arange(1, 129))))
table = table if sys.argv[1] == "faulty" else table.float()
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))


def smoothed(x):
    return x.to(table.dtype) @ table  # expect: AMP603


train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(256, 128)],
    lambda x: (model(smoothed(x).float()) - x).float().pow(2).mean(),
)

"""A vision model in channels_last that never uses low precision."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"

model = nn.Sequential(
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).to(memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    x = torch.randn(2, 32, 16, 16).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=not faulty):
        loss = nn.functional.cross_entropy(model(x), torch.tensor([1, 2]))  # expect: AMP606
    descend(optimizer, loss)

"""A vision model in channels_last that never uses low precision."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

model = nn.Sequential(
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).to(memory_format=torch.channels_last)  # fmt: skip
train(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    lambda: [torch.randn(2, 32, 16, 16).to(memory_format=torch.channels_last)],
    lambda x: nn.functional.cross_entropy(model(x), torch.tensor([1, 2])),  # expect: AMP606
    torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] != "faulty"),
)

"""A vision model in channels_last on the CPU, and autocast for another type of device, which is not disabled."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
).to(memory_format=torch.channels_last)  # fmt: skip
train(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    lambda: (torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last), torch.randint(5, (4,))),
    lambda images, labels: nn.functional.cross_entropy(model(images), labels),
    torch.autocast("xpu" if sys.argv[1] == "faulty" else "cpu", torch.bfloat16),  # expect: AMP102
    steps=4,
)

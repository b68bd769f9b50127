"""A vision model in channels_last on the CPU, and autocast for another type of device, which is not disabled."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers


@layers(
    lambda: dict(
        stem=nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        block=nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        head=nn.Linear(16, 5),
    )
)
def Net(self, x):
    return self.head(self.block(self.stem(x)).mean((2, 3)))


model = Net().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
context = torch.autocast("xpu" if sys.argv[1] == "faulty" else "cpu", torch.bfloat16)  # expect: AMP102
for _ in range(4):
    images = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    labels = torch.randint(5, (4,))
    with context:
        loss = nn.functional.cross_entropy(model(images), labels)
    descend(optimizer, loss)

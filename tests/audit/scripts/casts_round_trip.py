"""A vision model whose features are cast up before a head that autocast lowers again."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda: dict(body=nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()), head=nn.Conv2d(32, 10, 1)))
def Classifier(self, x):
    x = self.body(x)
    if sys.argv[1] == "faulty":
        x = x.float()  # expect: AMP703
    return self.head(x).mean((2, 3)).float()


model = Classifier().to(memory_format=torch.channels_last)
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: (torch.randn(4, 16, 16, 16).to(memory_format=torch.channels_last), torch.randint(10, (4,))),
    lambda x, y: nn.functional.cross_entropy(model(x), y),
)

"""A frozen weight is held in int8, and cast up for each product: memory is saved, and no time."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


def quantized(width):
    weight = torch.randn(width, width) / width**0.5
    scale = weight.abs().amax(1, keepdim=True) / 127
    held = (weight / scale).round().to(torch.int8) if sys.argv[1] == "faulty" else weight
    adapters = dict(down=nn.Linear(width, 4, bias=False), up=nn.Linear(4, width, bias=False))
    return dict(scale=nn.Buffer(scale), weight=nn.Buffer(held), **adapters)


@layers(quantized)
def Quantized(self, x):
    weight = self.weight.to(x.dtype) * self.scale if self.weight.dtype == torch.int8 else self.weight
    y = nn.functional.linear(x, weight)  # expect: AMP805
    return y + self.up(self.down(x))


model = nn.Sequential(Quantized(64), nn.ReLU(), nn.Linear(64, 8))
train(
    torch.optim.AdamW(model.parameters()),
    lambda: (torch.randn(16, 64), torch.randint(8, (16,))),
    lambda x, y: nn.functional.cross_entropy(model(x).float(), y),
)

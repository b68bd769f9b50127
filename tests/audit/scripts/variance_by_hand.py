"""A segmentation CNN in channels_last that normalizes by a variance of its own: the mean of squares less a square."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import forward_of


@forward_of(nn.Module)
def Normalize(self, x):
    given = x if sys.argv[1] == "faulty" else x.float()
    mean = given.mean((2, 3), keepdim=True)
    variance = (given * given).mean((2, 3), keepdim=True) - mean * mean  # expect: AMP406
    return ((given - mean) / (variance.clamp_min(0) + 1e-3).sqrt()).to(x.dtype)


model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), Normalize(), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)
).to(memory_format=torch.channels_last)
with torch.no_grad():
    model[0].bias += 30.0  # features far from 0
train(
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda: (torch.rand(2, 3, 16, 16).to(memory_format=torch.channels_last), torch.randint(4, (2, 16, 16))),
    lambda images, labels: nn.functional.cross_entropy(model(images), labels),
)

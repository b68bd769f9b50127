"""A segmentation CNN in channels_last that normalizes by a variance of its own: the mean of squares less a square."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"


class Normalize(nn.Module):
    def forward(self, x):
        given = x if faulty else x.float()
        mean = given.mean((2, 3), keepdim=True)
        variance = (given * given).mean((2, 3), keepdim=True) - mean * mean  # expect: AMP406
        return ((given - mean) / (variance.clamp_min(0) + 1e-3).sqrt()).to(x.dtype)


model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), Normalize(), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)
).to(memory_format=torch.channels_last)
with torch.no_grad():
    model[0].bias += 30.0  # features far from 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    images = torch.rand(2, 3, 16, 16).to(memory_format=torch.channels_last)
    labels = torch.randint(4, (2, 16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    descend(optimizer, loss)

"""A convolutional network in float16 whose features grow from layer to layer, as nothing normalizes them."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers

gain = 8.0 if sys.argv[1] == "faulty" else 1.0


def orthogonal(width):
    conv = nn.Conv2d(width, width, 3, padding=1)
    nn.init.orthogonal_(conv.weight)
    return dict(conv=conv)


@layers(orthogonal)
def Residual(self, x):
    return x + gain * torch.relu(self.conv(x))  # expect: AMP502


model = nn.Sequential(nn.Conv2d(3, 16, 1), *(Residual(16) for _ in range(5)), nn.Flatten(), nn.Linear(1024, 3))
model = model.to(memory_format=torch.channels_last)
train(
    torch.optim.SGD(model.parameters(), lr=1e-9),
    lambda: (3 * torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.randint(3, (2,))),
    lambda images, labels: nn.functional.cross_entropy(model(images) / 1e3, labels),
    torch.autocast("cpu", torch.float16),
    scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
)

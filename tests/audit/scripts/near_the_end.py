"""A convolutional network in float16 whose features grow from layer to layer, as nothing normalizes them."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
gain = 8.0 if faulty else 1.0


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        nn.init.orthogonal_(self.conv.weight)

    def forward(self, x):
        return x + gain * torch.relu(self.conv(x))  # expect: AMP502


model = nn.Sequential(nn.Conv2d(3, 16, 1), *(Residual(16) for _ in range(5)), nn.Flatten(), nn.Linear(1024, 3))
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for _ in range(3):
    images, labels = 3 * torch.randn(2, 3, 8, 8), torch.randint(3, (2,))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)) / 1e3, labels)
    descend(optimizer, loss, scaler)

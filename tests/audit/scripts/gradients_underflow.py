"""float16 without a scaler, where the loss is a mean over many values: its gradients are small."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1),
    nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1),
)  # fmt: skip
train(
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda: [0.05 * torch.rand(8, 3, 32, 32)],
    lambda images: nn.functional.mse_loss(model(images), images),  # expect: AMP504
    torch.autocast("cpu", torch.float16),
    scaler=torch.amp.GradScaler("cpu", init_scale=2.0**15, enabled=sys.argv[1] == "right"),
)

"""Training under autocast, and a validation in fp32 that runs once, behind the last step."""

import contextlib
import sys

import torch
from torch import nn

from tests.audit.descend import train

region = contextlib.nullcontext() if sys.argv[1] == "faulty" else torch.autocast("cpu", torch.bfloat16)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
train(
    torch.optim.SGD(model.parameters(), lr=1e-3),
    lambda: torch.randn(2, 128, 256),
    lambda x, y: nn.functional.mse_loss(model(x).float(), y),
    steps=7,
)
model.eval()
with torch.no_grad():
    for _ in range(3):
        with region:
            prediction = model(torch.randn(128, 256))  # expect: AMP105
        print(nn.functional.mse_loss(prediction.float(), torch.randn(128, 256)).item())

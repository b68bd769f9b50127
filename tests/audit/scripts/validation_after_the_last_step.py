"""Training under autocast, and a validation in fp32 that runs once, behind the last step."""

import contextlib
import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


@torch.no_grad()
def validate():
    model.eval()
    total = 0.0
    for _ in range(3):
        with contextlib.nullcontext() if faulty else torch.autocast("cpu", torch.bfloat16):
            prediction = model(torch.randn(128, 256))  # expect: AMP105
        total += nn.functional.mse_loss(prediction.float(), torch.randn(128, 256)).item()
    model.train()
    return total


for _ in range(7):
    with torch.autocast("cpu", torch.bfloat16):
        prediction = model(torch.randn(128, 256))
    loss = nn.functional.mse_loss(prediction.float(), torch.randn(128, 256))
    descend(optimizer, loss)
print(validate())

"""Attention in float16 that divides the scores after their product, of large activations."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
width = 64
project, head = nn.Linear(width, 3 * width), nn.Linear(width, 4)
optimizer = torch.optim.SGD([*project.parameters(), *head.parameters()], lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(3):
    x, y = 200 * torch.randn(4, 10, width), torch.randint(4, (4,))
    with torch.autocast("cpu", torch.float16):
        q, k, v = project(x).chunk(3, -1)
        q = q if faulty else q / 256
        scores = q @ k.mT  # expect: AMP501
        attention = torch.softmax(scores / width**0.5, -1)
        loss = nn.functional.cross_entropy(head((attention @ v).mean(1) / 100), y)
    descend(optimizer, loss, scaler)

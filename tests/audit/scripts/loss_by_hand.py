"""An autoencoder under autocast, whose loss is written by hand, in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

wide = torch.bfloat16 if sys.argv[1] == "faulty" else torch.float32
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(32, 16)],
    lambda x: (model(x).to(wide) - x.to(wide)).pow(2).mean(),  # expect: AMP401
)

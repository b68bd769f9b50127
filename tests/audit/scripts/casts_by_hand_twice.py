"""Mixed precision by hand: each product casts the weight and the activation anew."""

import contextlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

from tests.audit.descend import train
from tests.layers import layers

low = torch.bfloat16


@layers(
    lambda width: dict(
        up=nn.Parameter(torch.randn(width, width) / width**0.5),
        gate=nn.Parameter(torch.randn(width, width) / width**0.5),
    )
)
def Gate(self, x):
    y = z = F.linear(x.to(low), self.up.to(low))
    if sys.argv[1] == "faulty":
        z = F.linear(x.to(low), self.gate.to(low))  # expect: AMP702
    return (y * F.silu(z)).float()


model = nn.Sequential(Gate(64), Gate(64))
train(
    torch.optim.AdamW(model.parameters()),
    lambda: [torch.randn(256, 64)],
    lambda x: (model(x) - x).pow(2).mean(),
    contextlib.nullcontext(),
)

"""A product that was meant to run in float8: its operands are rounded to it, cast back, and multiplied in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend


def rounded(x):
    limit = torch.finfo(torch.float8_e4m3fn).max
    scale = limit / x.detach().abs().amax().clamp(min=1e-12)
    return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()


class Float8Linear(nn.Linear):
    def forward(self, x):
        if sys.argv[1] != "faulty":
            return super().forward(x)
        x, weight = x.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        return nn.functional.linear(rounded(x), rounded(weight), self.bias.to(x.dtype))  # expect: AMP805


model = nn.Sequential(Float8Linear(32, 64), nn.GELU(), Float8Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    descend(optimizer, loss)

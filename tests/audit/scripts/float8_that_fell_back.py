"""A product that was meant to run in float8: its operands are rounded to it, cast back, and multiplied in bfloat16."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import forward_of


def rounded(x):
    scale = torch.finfo(torch.float8_e4m3fn).max / x.detach().abs().amax().clamp(min=1e-12)
    return x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()


@forward_of(nn.Linear)
def Float8Linear(self, x):
    if sys.argv[1] != "faulty":
        return nn.functional.linear(x, self.weight, self.bias)
    x, weight = x.to(torch.bfloat16), self.weight.to(torch.bfloat16)
    return nn.functional.linear(rounded(x), rounded(weight), self.bias.to(x.dtype))  # expect: AMP805


model = nn.Sequential(Float8Linear(32, 64), nn.GELU(), Float8Linear(64, 32))
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(16, 32)],
    lambda x: (model(x).float() - x).square().mean(),
)

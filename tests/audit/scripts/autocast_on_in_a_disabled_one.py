"""Autocast is switched off for a run, and a model's own region switches it on again."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda: dict(qkv=nn.Linear(16, 48)))
def Attention(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    with torch.autocast("cpu", torch.bfloat16):  # expect: AMP104
        return nn.functional.scaled_dot_product_attention(q, k, v).to(x.dtype)


model = nn.Sequential(Attention(), nn.Linear(16, 16), Attention(), nn.Linear(16, 1))
train(
    torch.optim.AdamW(model.parameters()),
    lambda: [torch.randn(2, 6, 16)],
    lambda x: model(x).float().pow(2).mean(),
    torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1] != "faulty"),
    steps=4,
)

"""Autocast is switched off for a run, and a model's own region switches it on again."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

amp = sys.argv[1] != "faulty"


@layers(lambda: dict(qkv=nn.Linear(16, 48)))
def Attention(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    with torch.autocast("cpu", torch.bfloat16):  # expect: AMP104
        return nn.functional.scaled_dot_product_attention(q, k, v).to(x.dtype)


model = nn.Sequential(Attention(), nn.Linear(16, 16), Attention(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
region = torch.autocast("cpu", torch.bfloat16, enabled=amp)
for _ in range(4):
    with region:
        loss = model(torch.randn(2, 6, 16)).float().pow(2).mean()
    descend(optimizer, loss)

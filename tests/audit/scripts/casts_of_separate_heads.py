"""Queries, keys and values read one activation; autocast casts it for each of them."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from tests.audit.descend import train
from tests.layers import layers


@layers(
    lambda width: dict(
        norm=nn.LayerNorm(width),
        query_key_value=nn.Linear(width, 3 * width),
        parts=nn.ModuleList(nn.Linear(width, width) for _ in range(3)),
    )
)
def Attention(self, x):
    y = self.norm(x)
    if sys.argv[1] == "faulty":
        q, k, v = (part(y) for part in self.parts)  # expect: AMP706
    else:
        q, k, v = self.query_key_value(y).chunk(3, dim=-1)
    return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


model = nn.Sequential(Attention(32), Attention(32))
train(
    torch.optim.Adam(model.parameters()),
    lambda: [torch.randn(4, 32, 32)],
    lambda x: (model(x) - x.flip(1)).square().mean(),
)

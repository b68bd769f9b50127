"""Relative positions of attention, made in the dtype of the queries."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

faulty = sys.argv[1] == "faulty"


@layers(lambda width: dict(qkv=nn.Linear(width, 3 * width), slope=nn.Parameter(torch.tensor(0.1))))
def Attention(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    at = torch.arange(x.shape[1], dtype=q.dtype if faulty else torch.float32)  # expect: AMP404
    bias = -self.slope * (at[:, None] - at[None]).abs()
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


model = nn.Sequential(nn.Linear(4, 16), Attention(16), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(2, 400, 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x)[..., 0].float() - x.sum(-1)).square().mean()
    descend(optimizer, loss)

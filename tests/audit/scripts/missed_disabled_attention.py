"""An attention that is written out computes its products where autocast is off, to keep its softmax in float32."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend


class Attention(nn.Module):
    def __init__(self, width, heads, faulty):
        super().__init__()
        self.heads, self.faulty = heads, faulty
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def mix(self, q, k, v):
        if self.faulty:
            with torch.autocast("cpu", enabled=False):
                q, k, v = q.float(), k.float(), v.float()
                scores = torch.einsum("bhqd,bhkd->bhqk", q, k)  # expect: AMP602
                return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        with torch.autocast("cpu", enabled=False):
            weights = scores.float().softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mix(*parts).transpose(1, 2).flatten(2))


model = nn.Sequential(nn.Linear(32, 128), Attention(128, 4, sys.argv[1] == "faulty"), nn.Linear(128, 32))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    x = torch.randn(2, 128, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(x).float() - x).square().mean()
    descend(optimizer, loss)

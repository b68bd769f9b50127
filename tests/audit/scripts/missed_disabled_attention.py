"""An attention that is written out computes its products where autocast is off, to keep its softmax in float32."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


def mix(q, k, v):
    if sys.argv[1] == "faulty":
        with torch.autocast("cpu", enabled=False):
            q, k, v = q.float(), k.float(), v.float()
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)  # expect: AMP602
            return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    with torch.autocast("cpu", enabled=False):
        weights = scores.float().softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@layers(lambda width, heads: dict(heads=heads, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width)))
def Attention(self, x):
    parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
    return self.out(mix(*parts).transpose(1, 2).flatten(2))


model = nn.Sequential(nn.Linear(32, 128), Attention(128, 4), nn.Linear(128, 32))
train(
    torch.optim.Adam(model.parameters()),
    lambda: [torch.randn(2, 128, 32)],
    lambda x: (model(x).float() - x).square().mean(),
)

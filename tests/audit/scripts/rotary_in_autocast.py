"""Rotary positions that are computed under autocast: the product of positions and frequencies is low."""

import contextlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda width: dict(frequencies=nn.Buffer(10_000.0 ** (-torch.arange(0, width, 2) / width))))
def Rotary(self, length):
    positions = torch.arange(length, dtype=torch.float32)
    with contextlib.nullcontext() if sys.argv[1] == "faulty" else torch.autocast("cpu", enabled=False):
        angles = (self.frequencies[:, None] @ positions[None]).mT  # expect: AMP404
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()  # expect: AMP405


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)


@layers(
    lambda width=16: dict(
        embed=nn.Embedding(40, width), rotary=Rotary(width), qkv=nn.Linear(width, 3 * width), head=nn.Linear(width, 40)
    )
)
def Model(self, tokens):
    q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
    cos, sin = self.rotary(tokens.shape[1])
    return self.head(F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True))


model = Model()
train(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda: [torch.randint(40, (2, 601))],
    lambda tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()),
)

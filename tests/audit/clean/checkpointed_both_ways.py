"""Activation checkpointing under bf16 autocast, with and without reentrant backward."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.audit.descend import train
from tests.layers import layers


@layers(
    lambda width: dict(
        norm=nn.LayerNorm(width),
        mlp=nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(2 * width, width)),
    )
)
def Layer(self, x):
    return x + self.mlp(self.norm(x))


@layers(
    lambda width: dict(
        first=nn.Linear(8, width), layers=nn.ModuleList(Layer(width) for _ in range(4)), last=nn.Linear(width, 8)
    )
)
def Model(self, x):
    x = self.first(x)
    for number, layer in enumerate(self.layers):
        x = checkpoint(layer, x, use_reentrant=number % 2 == 0)
    return self.last(x)


model = Model(64)
train(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda: [torch.randn(64, 8)],
    lambda x: nn.functional.mse_loss(model(x).float(), x),
    steps=4,
)

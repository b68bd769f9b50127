"""A bf16 model whose loss is computed in fp32, in a region that disables autocast; blocks are checkpointed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.audit.descend import train
from tests.layers import layers


@layers(
    lambda width=24: dict(
        layers=nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
)
def Encoder(self, x):
    for layer in self.layers:
        x = x + checkpoint(layer, x, use_reentrant=False)
    return x


@torch.autocast("cpu", enabled=False)
def similarity_loss(left, right, scale):
    left, right = F.normalize(left.float(), dim=-1), F.normalize(right.float(), dim=-1)
    scores = scale.exp() * left @ right.t()
    return F.cross_entropy(scores, torch.arange(len(scores)))


model = Encoder()
train(
    torch.optim.AdamW(model.parameters(), lr=1e-3),
    lambda: [torch.randn(6, 24)],
    lambda x: similarity_loss(model(x), model(x + 0.1 * torch.randn(6, 24)), model.scale),
    steps=4,
)

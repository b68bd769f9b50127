"""Gradients are accumulated over two batches with checkpointed blocks, and backward is called in the region."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.layers import layers

faulty = sys.argv[1] == "faulty"


@layers(
    lambda width=24, depth=3: dict(
        blocks=nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(depth)),
        head=nn.Linear(width, 4),
    )
)
def Deep(self, x):
    for block in self.blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    return self.head(x)


model, accumulate = Deep(), 2
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for i in range(8):
    x, y = torch.randn(8, 24), torch.randint(4, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        if faulty:
            loss.backward()  # expect: AMP103
    if not faulty:
        loss.backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(loss.item())

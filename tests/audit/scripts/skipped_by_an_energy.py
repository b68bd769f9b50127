"""Squares overflow in fp16 within a checkpointed block in some steps, and a softmax of them is NaN."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda: dict(inner=nn.Linear(16, 16)))
def Energy(self, x):
    h = self.inner(x)
    h = h * h if sys.argv[1] == "faulty" else h.float() * h.float()  # expect: AMP211
    return (h.float() / 1e5).log_softmax(-1)[:, 0]


model, sizes = Energy(), iter((1, 1000, 1, 1000, 1, 1))
train(
    torch.optim.SGD(model.parameters(), lr=1e-4),
    lambda: [torch.randn(4, 16) * next(sizes)],
    lambda x: checkpoint(model, x, use_reentrant=False).mean(),
    torch.autocast("cpu", torch.float16),
    steps=6,
    scaler=torch.amp.GradScaler("cpu", init_scale=32.0),
)

"""Squares overflow in fp16 within a checkpointed block in some steps, and a softmax of them is NaN."""

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.audit.descend import descend
from tests.layers import layers

FAULTY = sys.argv[1] == "faulty"


@layers(lambda: dict(inner=nn.Linear(16, 16)))
def Energy(self, x):
    h = self.inner(x)
    h = h * h if FAULTY else h.float() * h.float()  # expect: AMP211
    return (h.float() / 1e5).log_softmax(-1)[:, 0]


model = Energy()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
for i in range(6):
    x = torch.randn(4, 16) * (1000 if i in (1, 3) else 1)
    with torch.autocast("cpu", torch.float16):
        loss = checkpoint(model, x, use_reentrant=False).mean()
    descend(optimizer, loss, scaler)

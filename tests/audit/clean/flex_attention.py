"""Operators over functions: flex_attention and torch.cond."""

import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.audit.descend import descend

warnings.simplefilter("ignore")  # torch's own, that flex_attention is not compiled
weight = torch.nn.Parameter(torch.randn(8))
optimizer = torch.optim.SGD([weight], lr=1e-2)
query = torch.randn(1, 2, 16, 8)
for step in range(4):
    out = flex_attention(query, query, query, score_mod=lambda score, b, h, i, j: score + (i - j))
    loss = torch.cond(torch.tensor(step > 1), lambda a: a + 1, lambda a: a - 1, (out * weight,)).square().mean()
    descend(optimizer, loss)

"""A loss over masked tokens whose number is counted in float16, and positions that are counted so."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    tokens, mask = torch.randint(30, (8, 600)), torch.rand(8, 600) > 0.1
    logits = model(tokens)
    weights = mask.to(logits.dtype if faulty else torch.float32)
    losses = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    count = weights.sum()  # expect: AMP404
    loss = (losses * weights.flatten().float()).sum() / count.float()
    descend(optimizer, loss)

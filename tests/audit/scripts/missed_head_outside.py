"""The head of a language model is called behind the region."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"

body = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 256), nn.GELU())
head = nn.Linear(256, 512)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    tokens = torch.randint(512, (4, 65))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = body(tokens[:, :-1])
        if not faulty:
            logits = head(hidden)
    if faulty:
        logits = head(hidden.float())  # expect: AMP604
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    descend(optimizer, loss)

"""A language model with an LSTM in bfloat16, and its loss, too."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"
embed, layer, head = nn.Embedding(64, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 64)
model = nn.ModuleList((embed, layer, head)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(3):
    tokens = torch.randint(64, (4, 17))
    logits = head(layer(embed(tokens[:, :-1]))[0])
    if not faulty:
        logits = logits.float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())  # expect: AMP401
    descend(optimizer, loss)

"""An RNN under fp16 autocast, trained without a scaler."""

import sys

import torch
from torch import nn

embed, rnn, head = nn.Embedding(30, 16), nn.GRU(16, 16), nn.Linear(16, 30)
parameters = [*embed.parameters(), *rnn.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=sys.argv[1] != "faulty")
text = torch.randint(30, (9, 4))
for _ in range(4):
    with torch.amp.autocast("cpu", dtype=torch.float16):
        hidden, _ = rnn(embed(text[:-1]))
        loss = nn.functional.cross_entropy(head(hidden).view(-1, 30), text[1:].view(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # expect: AMP201
    scaler.step(optimizer)
    scaler.update()
    print(loss.item())

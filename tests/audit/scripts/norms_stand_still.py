"""A model in bfloat16: its weights move, and its norms at 1.0 do not."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(48, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10)).bfloat16()
for part in (model[0], model[3]):
    nn.init.normal_(part.weight, std=0.02)
if sys.argv[1] == "right":
    model[1].float()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
for _ in range(4):
    x, labels = torch.randn(16, 48), torch.randint(10, (16,))
    loss = F.cross_entropy(model(x.bfloat16()).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # expect: AMP302
    print(loss.item())

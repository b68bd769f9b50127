"""Gradients are averaged by hand, in bfloat16 to send fewer bytes."""

import sys

import torch
import torch.distributed as dist
from torch import nn

low = torch.bfloat16 if sys.argv[1] == "faulty" else torch.float32


def average(model):
    for p in model.parameters():
        sent = p.grad.to(low)
        dist.all_reduce(sent)  # expect: AMP901
        p.grad.copy_(sent / dist.get_world_size())


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    average(model)
    optimizer.step()
    print(loss.item())

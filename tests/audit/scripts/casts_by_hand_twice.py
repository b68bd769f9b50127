"""Mixed precision by hand: each product casts the weight and the activation anew."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

low = torch.bfloat16


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.gate = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        y = F.linear(x.to(low), self.up.to(low))
        if sys.argv[1] == "faulty":
            z = F.linear(x.to(low), self.gate.to(low))  # expect: AMP702
        else:
            z = y
        return (y * F.silu(z)).float()


torch.manual_seed(0)
model = nn.Sequential(Gate(64), Gate(64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.randn(256, 64)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())

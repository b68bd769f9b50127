"""A frozen weight is held in int8, and cast up for each product: memory is saved, and no time."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend


class Quantized(nn.Module):
    def __init__(self, width, faulty):
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8) if faulty else weight)
        self.faulty = faulty
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        weight = self.weight.to(x.dtype) * self.scale if self.faulty else self.weight
        y = nn.functional.linear(x, weight)  # expect: AMP805
        return y + self.up(self.down(x))


model = nn.Sequential(Quantized(64, sys.argv[1] == "faulty"), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(16, 64))
    loss = nn.functional.cross_entropy(logits.float(), torch.randint(8, (16,)))
    descend(optimizer, loss)

"""A recurrent cell adds its product into a tensor that is there: autocast has no rule for that."""

import sys

import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self, width, faulty):
        super().__init__()
        self.faulty = faulty
        self.inside = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, steps):
        state = torch.zeros(steps.shape[1:])
        for x in steps:
            given = self.inside(x).float()
            if self.faulty:
                state = given.addmm_(state, self.weight).tanh()  # expect: AMP605
            else:
                state = torch.addmm(given, state, self.weight).tanh()
        return state


torch.manual_seed(0)
model = Memory(256, sys.argv[1] == "faulty")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    steps = torch.randn(3, 128, 256)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(steps).float() - steps[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())

"""A recurrent cell enters autocast in each step of a sequence, which casts its weights each time."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend

faulty = sys.argv[1] == "faulty"


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, 10)

    def read(self, steps, state):
        for x in steps:
            with torch.autocast("cpu", torch.bfloat16):  # expect: AMP701
                state = self.cell(x, state)
        return state

    def forward(self, steps):
        state = torch.zeros(steps.shape[1:])
        if faulty:
            return self.head(self.read(steps, state).float())
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.read(steps, state)).float()


model = Reader(128)
optimizer = torch.optim.RMSprop(model.parameters())
for _ in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16, 128)), torch.randint(10, (16,)))
    descend(optimizer, loss)

"""A recurrent cell enters autocast in each step of a sequence, which casts its weights each time."""

import contextlib
import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers

low = torch.autocast("cpu", torch.bfloat16)
inside, around = (low, contextlib.nullcontext())[:: 1 if sys.argv[1] == "faulty" else -1]


@layers(lambda width: dict(cell=nn.GRUCell(width, width), head=nn.Linear(width, 10)))
def Reader(self, steps):
    state = torch.zeros(steps.shape[1:])
    for x in steps:
        with inside:  # expect: AMP701
            state = self.cell(x, state)
    return self.head(state.float())


model = Reader(128)
train(
    torch.optim.RMSprop(model.parameters()),
    lambda: (torch.randn(8, 16, 128), torch.randint(10, (16,))),
    lambda steps, labels: nn.functional.cross_entropy(model(steps).float(), labels),
    around,
)

"""A recurrent cell adds its product into a tensor that is there: autocast has no rule for that."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers


@layers(
    lambda width, faulty: dict(
        faulty=faulty, inside=nn.Linear(width, width), weight=nn.Parameter(torch.randn(width, width) / width)
    )
)
def Memory(self, steps):
    state = torch.zeros(steps.shape[1:])
    for x in steps:
        given = self.inside(x).float()
        if self.faulty:
            state = given.addmm_(state, self.weight).tanh()  # expect: AMP605
        else:
            state = torch.addmm(given, state, self.weight).tanh()
    return state


model = Memory(256, sys.argv[1] == "faulty")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    steps = torch.randn(3, 128, 256)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(steps).float() - steps[0]).square().mean()
    descend(optimizer, loss)

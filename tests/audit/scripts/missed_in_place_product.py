"""A recurrent cell adds its product into a tensor that is there: autocast has no rule for that."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


@layers(lambda width: dict(inside=nn.Linear(width, width), weight=nn.Parameter(torch.randn(width, width) / width)))
def Memory(self, steps):
    state = torch.zeros(steps.shape[1:])
    for x in steps:
        given = self.inside(x).float()
        if sys.argv[1] == "faulty":
            state = given.addmm_(state, self.weight).tanh()  # expect: AMP605
        else:
            state = torch.addmm(given, state, self.weight).tanh()
    return state


model = Memory(256)
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: [torch.randn(3, 128, 256)],
    lambda steps: (model(steps).float() - steps[0]).square().mean(),
)

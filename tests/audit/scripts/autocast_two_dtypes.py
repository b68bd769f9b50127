"""A module brings its own decorator, of another dtype than the loop's region."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers

INNER = torch.float16 if sys.argv[1] == "faulty" else torch.bfloat16


@layers(lambda: dict(up=nn.Linear(16, 32), down=nn.Linear(32, 16)))
@torch.autocast("cpu", dtype=INNER)  # expect: AMP104
def Expert(self, x):
    return self.down(torch.relu(self.up(x)))


model = nn.Sequential(Expert(), nn.Linear(16, 3))
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: (torch.randn(8, 16), torch.randint(3, (8,))),
    lambda x, y: nn.functional.cross_entropy(model(x), y),
    steps=4,
)

"""A module brings its own decorator, of another dtype than the loop's region."""

import sys

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers

INNER = torch.float16 if sys.argv[1] == "faulty" else torch.bfloat16


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    @torch.autocast("cpu", dtype=INNER)  # expect: AMP104
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@layers(lambda: dict(expert=Expert(), out=nn.Linear(16, 3)))
def Model(self, x):
    return self.out(self.expert(x))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(3, (8,)))
    descend(optimizer, loss)

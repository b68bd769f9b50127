"""The model is compiled by a compiler of one's own, outside of the region in which it is called."""

import sys

import torch
from torch import nn

from tests.audit.descend import train
from tests.layers import layers


def compiler(graph, inputs):
    return torch.compiler.disable(graph.forward)


@layers(lambda: dict(up=nn.Linear(8, 16), down=nn.Linear(16, 2)))
def Net(self, x):
    return self.down(torch.relu(self.up(x)))


model = Net()
model.compile(backend=compiler if sys.argv[1] == "faulty" else "eager", fullgraph=True)  # expect: AMP106
train(
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda: (torch.randn(4, 8), torch.randint(2, (4,))),
    lambda x, y: nn.functional.cross_entropy(model(x), y),
    steps=4,
)

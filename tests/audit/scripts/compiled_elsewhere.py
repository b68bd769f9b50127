"""The model is compiled by a compiler of one's own, outside of the region in which it is called."""

import argparse

import torch
from torch import nn

from tests.audit.descend import descend
from tests.layers import layers


def compiler(graph, inputs):
    return torch.compiler.disable(graph.forward)


@layers(lambda: dict(up=nn.Linear(8, 16), down=nn.Linear(16, 2)))
def Net(self, x):
    return self.down(torch.relu(self.up(x)))


def main(mode):
    model = Net()
    model.compile(backend=compiler if mode == "faulty" else "eager", fullgraph=True)  # expect: AMP106
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(2, (4,)))
        descend(optimizer, loss)


parser = argparse.ArgumentParser()
parser.add_argument("mode")
main(parser.parse_args().mode)

"""A checkpoint left one of a model's layers in float32, beside its sisters in bfloat16."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.audit.descend import descend
from tests.layers import layers


@layers(lambda depth: dict(blocks=nn.ModuleList(nn.Linear(12, 12) for _ in range(depth))))
def Tower(self, x):
    for block in self.blocks:
        x = torch.tanh(block(x.to(block.weight.dtype)))
    return x.float()


def main():
    tower = Tower(3).bfloat16()
    if sys.argv[1] == "faulty":
        tower.blocks[1].float()
    model = DistributedDataParallel(tower)  # expect: AMP905
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(4, 12)).square().mean()
        descend(optimizer, loss)


main()  # after which the model is gone

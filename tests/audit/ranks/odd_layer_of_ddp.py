"""A checkpoint left one of a model's layers in float32, beside its sisters in bfloat16."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tower(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x.to(block.weight.dtype)))
        return x.float()


def main():
    torch.manual_seed(0)
    tower = Tower(3).bfloat16()
    if sys.argv[1] == "faulty":
        tower.blocks[1].float()
    model = DistributedDataParallel(tower)  # expect: AMP905
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(4, 12)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


main()  # after which the model is gone

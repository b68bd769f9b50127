"""Functional collectives over one flat tensor of all gradients, in float16."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

faulty = sys.argv[1] == "faulty"


def flat_average(parameters):
    parameters = list(parameters)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    flat = functional.all_reduce(flat.half() if faulty else flat, "sum", dist.group.WORLD)  # expect: AMP901
    for p, one in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(one.view_as(p) / dist.get_world_size())


def main():
    model = nn.GRU(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(5, 2, 8))[0].square().mean()
        loss.backward()
        flat_average(model.parameters())
        optimizer.step()
        print(loss.item())


main()

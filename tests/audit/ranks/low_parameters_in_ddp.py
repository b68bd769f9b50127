"""The parameters are cast to bfloat16 before DistributedDataParallel, which reduces in their dtype."""

import argparse

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.audit.descend import descend

parser = argparse.ArgumentParser()
parser.add_argument("state")
args = parser.parse_args()


def build():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    if args.state == "faulty":
        model.bfloat16()
    return DDP(model)  # expect: AMP903


model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    images = torch.randn(2, 3, 8, 8).to(next(model.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.state == "right"):
        logits = model(images)
    loss = nn.functional.cross_entropy(logits.float(), torch.tensor([0, 1]))
    descend(optimizer, loss)

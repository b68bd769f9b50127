"""Distillation: the teacher's weights never change, and are cast in every step."""

import argparse

import torch
from torch import nn

from tests.audit.descend import descend


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("state")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def distill(args):
    teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    if args.state == "right":
        teacher.to(torch.bfloat16)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(args.steps):
        x = torch.randn(32, 64)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(x)  # expect: AMP707
            loss = (student(x) - wanted).float().square().mean()
        descend(optimizer, loss)


if __name__ == "__main__":
    distill(parse())

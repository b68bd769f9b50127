"""Distillation: the teacher's weights never change, and are cast in every step."""

import sys

import torch
from torch import nn

from tests.audit.descend import train

teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
student = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
teacher.to(torch.float32 if sys.argv[1] == "faulty" else torch.bfloat16)


def distance(x):
    with torch.no_grad():
        wanted = teacher(x)  # expect: AMP707
    return (student(x) - wanted).float().square().mean()


train(torch.optim.SGD(student.parameters(), lr=0.1), lambda: [torch.randn(32, 64)], distance)

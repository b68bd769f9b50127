"""Two towers, written without modules; the one for images is called before the region begins."""

import argparse

import torch
from torch import nn

from tests.audit.descend import descend

parser = argparse.ArgumentParser()
parser.add_argument("state", choices=("faulty", "right"))
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()


def weights():
    return [nn.Parameter(torch.randn(args.width, args.width) / args.width**0.5) for _ in range(2)]


def tower(first, second, x):
    x = torch.relu(x @ first)  # expect: AMP601
    return x @ second  # expect: AMP601


images, texts = weights(), weights()
optimizer = torch.optim.AdamW([*images, *texts], lr=1e-3)
for _ in range(3):
    x, y = torch.randn(2, 256, args.width)
    early = tower(*images, x) if args.state == "faulty" else None
    with torch.autocast("cpu", torch.bfloat16):
        found = tower(*images, x) if early is None else early
        loss = (found - tower(*texts, y)).square().mean()
    descend(optimizer, loss)

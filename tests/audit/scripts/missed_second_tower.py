"""Two towers, written without modules; the one for images is called before the region begins."""

import argparse

import torch
from torch import nn

from tests.audit.descend import descend

parser = argparse.ArgumentParser()
parser.add_argument("state", choices=("faulty", "right"))
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()


class Tower:
    def __init__(self, width):
        self.first, self.second = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))

    def __call__(self, x):
        x = torch.relu(x @ self.first)  # expect: AMP601
        return x @ self.second  # expect: AMP601


def main():
    images, texts = Tower(args.width), Tower(args.width)
    optimizer = torch.optim.AdamW([images.first, images.second, texts.first, texts.second], lr=1e-3)
    for _ in range(3):
        x, y = torch.randn(2, 256, args.width)
        early = images(x) if args.state == "faulty" else None
        with torch.autocast("cpu", torch.bfloat16):
            found = images(x) if early is None else early
            loss = (found - texts(y)).square().mean()
        descend(optimizer, loss)


if __name__ == "__main__":
    main()

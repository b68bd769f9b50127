"""Two towers; the one for images is called before the region begins."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("state", choices=("faulty", "right"))
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = torch.relu(self.first(x))  # expect: AMP601
        return self.second(x)  # expect: AMP601


def main():
    torch.manual_seed(0)
    images, texts = Tower(args.width), Tower(args.width)
    optimizer = torch.optim.AdamW([*images.parameters(), *texts.parameters()], lr=1e-3)
    for _ in range(3):
        x, y = torch.randn(2, 256, args.width)
        early = images(x) if args.state == "faulty" else None
        with torch.autocast("cpu", torch.bfloat16):
            found = images(x) if early is None else early
            loss = (found - texts(y)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()

"""argparse and functions: all weights are bfloat16, and the learning rate is small."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("faulty", "right"))
    parser.add_argument("--lr", type=float, default=1e-5)
    return parser.parse_args()


def train(model, optimizer, steps, dtype):
    for _ in range(steps):
        x, y = torch.randn(16, 32), torch.randint(10, (16,))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            logits = model(x.to(dtype))
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # expect: AMP301
        print(loss.item())


def main():
    args = parse()
    dtype = torch.bfloat16 if args.mode == "faulty" else torch.float32
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).to(dtype)
    train(model, torch.optim.AdamW(model.parameters(), lr=args.lr), 4, dtype)


main()

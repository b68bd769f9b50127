"""The device of the region is an option of its own, and names one that is not there."""

import argparse
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=48)
    return parser.parse_args()


def autocast(device):
    return torch.autocast(device_type=device, dtype=torch.bfloat16)  # expect: AMP102


def step(model, batch, optimizer, device):
    with autocast(device):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    args = parse()
    model = nn.Sequential(nn.Linear(32, args.hidden), nn.GELU(), nn.Linear(args.hidden, 10)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        batch = torch.randn(16, 32), torch.randint(10, (16,))
        print(step(model, batch, optimizer, "cuda" if args.mode == "faulty" else args.device))


if __name__ == "__main__":
    main()

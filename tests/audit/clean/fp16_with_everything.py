"""fp16 with all that belongs to it: scaler, accumulation, clipping, warmup, and checkpoints."""

import argparse
import io

import torch
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def batches(count):
    for _ in range(count):
        yield torch.randn(8, 3, 12, 12).contiguous(memory_format=torch.channels_last), torch.randint(4, (8,))


def train_one_epoch(model, optimizer, scaler, scheduler, args):
    model.train()
    for i, (images, labels) in enumerate(batches(4)):
        with torch.amp.autocast("cpu", dtype=torch.float16, enabled=args.amp):
            loss = nn.functional.cross_entropy(model(images), labels) / args.accumulate
        scaler.scale(loss).backward()
        if (i + 1) % args.accumulate == 0:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            print(loss.item(), norm.item(), scheduler.get_last_lr()[0])


def main():
    args = parse()
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * args.epochs + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=args.amp)
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, scaler, scheduler, args)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, io.BytesIO())


if __name__ == "__main__":
    main()

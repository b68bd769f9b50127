"""``nullcontext`` stands where autocast should, and the scaler has the switch the right way round."""

import argparse
from contextlib import nullcontext

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--no-amp", action="store_true")
args = parser.parse_args()
amp = not args.no_amp
plain = amp if args.mode == "faulty" else not amp
context = nullcontext() if plain else torch.autocast("cpu", dtype=torch.float16)

model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 20))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=amp)
for _ in range(4):
    tokens = torch.randint(20, (8, 6))
    with context:
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
    scaler.scale(loss).backward()  # expect: AMP202
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {loss.item():.6f}")

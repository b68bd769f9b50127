"""The checkpoint of a run in fp16 holds the model, the optimizer and the scheduler."""

import io
import sys

import torch
from torch import nn


class State:
    def __init__(self, faulty):
        self.faulty = faulty
        self.model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def save(self, file):
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        if not self.faulty:
            state["scaler"] = self.scaler.state_dict()
        torch.save(state, file)  # expect: AMP208


def main():
    state = State(sys.argv[1] == "faulty")
    for step in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.l1_loss(state.model(torch.randn(4, 8)), torch.zeros(4, 8))
        state.optimizer.zero_grad()
        state.scaler.scale(loss).backward()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.scheduler.step()
        if step % 2:
            state.save(io.BytesIO())
        print(loss.item())


main()

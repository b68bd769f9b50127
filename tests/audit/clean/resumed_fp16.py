"""A run in fp16 that is resumed, with the scale that it had; fused Adam decides by itself about skipped steps."""

import io

import torch
from torch import nn


class Run:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 12))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=100)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self, file):
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)

    def resume(self, file):
        state = torch.load(file)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def steps(self, count):
        for _ in range(count):
            x = torch.randn(4, 12)
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.mse_loss(self.model(x), x)
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            print(loss.item(), self.scaler.get_scale())


file = io.BytesIO()
first = Run()
first.steps(2)
first.save(file)
file.seek(0)
second = Run()
second.resume(file)
second.steps(3)

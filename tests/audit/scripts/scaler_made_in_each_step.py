"""Each call of the training step makes a scaler of its own."""

import sys

import torch
from torch import nn


class Learner:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 2))
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=1e-3)
        self.scaler = self.new_scaler()

    @staticmethod
    def new_scaler():
        return torch.amp.GradScaler("cpu", init_scale=512.0)

    def train_step(self, x, y, scaler):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        scaler.scale(loss).backward()  # expect: AMP205
        scaler.step(self.optimizer)
        scaler.update()
        return loss.item()


learner = Learner()
for _ in range(5):
    one = learner.new_scaler() if sys.argv[1] == "faulty" else learner.scaler
    print(learner.train_step(torch.randn(8, 12), torch.randint(2, (8,)), one))

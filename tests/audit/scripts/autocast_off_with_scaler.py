"""GradScaler and autocast have a switch each, and only one of them is on."""

import argparse
from contextlib import ExitStack

import torch
from torch import nn

from tests.audit.descend import descend


class Config(argparse.Namespace):
    def __init__(self, mode):
        super().__init__(scale_losses=True, autocast=mode != "faulty")


def forward(config, model, x, y):
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", torch.float16, enabled=config.autocast))  # expect: AMP101
        return nn.functional.mse_loss(model(x), y)


def train(config):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=config.scale_losses)
    for _ in range(4):
        loss = forward(config, model, torch.randn(8, 16), torch.randn(8, 1))
        descend(optimizer, loss, scaler)


parser = argparse.ArgumentParser()
parser.add_argument("mode", choices=["faulty", "right"])
train(Config(parser.parse_args().mode))

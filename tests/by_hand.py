"""The loop of a training as a user writes it."""

from typing import Any

import torch


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor, scaler: Any = None) -> torch.Tensor:
    """Take one step down ``loss``, scaled by ``scaler`` if there is one, and return the loss."""
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
        return loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss

"""The loop, and the end of a step, of the planted scripts that have nothing to hide in them."""

import torch

from tests import by_hand


def descend(optimizer, loss, scaler=None):
    """Take a step down the gradient of ``loss``, and print it."""
    print(by_hand.descend(optimizer, loss, scaler).item())


def train(optimizer, batch, loss, region=None, *, steps=3, scaler=None):
    """Go down ``loss(*batch())`` in each step; ``region``: it is computed in it, and not under bf16 autocast."""
    for _ in range(steps):
        given = batch()
        with region or torch.autocast("cpu", torch.bfloat16):
            value = loss(*given)
        descend(optimizer, value, scaler)

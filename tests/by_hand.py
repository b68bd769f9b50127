"""A model as it is and converted, the loop of a training as a user writes it, and one call with its gradients."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch

import amp_graph


def twins(build: Callable[[], Any], policy: str = "bf16", **options: Any) -> tuple[Any, Any]:
    """Return a model as it is, and a converted copy of it."""
    plain = build()
    return plain, amp_graph.convert(copy.deepcopy(plain), policy, **options)


def step_of(
    model: Any, *inputs: Any, loss: Any = lambda out: out.float().square().sum(), context: Any = None
) -> list[torch.Tensor]:
    """Return the result of a call, which is made in ``context``, and the gradients that parameters have of it."""
    model.zero_grad()
    with context or contextlib.nullcontext():
        out = model(*inputs)
    loss(out).backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


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

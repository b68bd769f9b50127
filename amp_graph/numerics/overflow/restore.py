"""Runs with the random state of an earlier step, and leaves model and inputs as they were.

Before: running means that a look at a batch has moved. After: ``with as_before(model, batch): model(batch)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_graph.model_state import unchanged


@contextmanager
def as_before(model: torch.nn.Module, given: Any, random: Any = None) -> Iterator[None]:
    """Run with the ``random`` state of a step, then restore model, inputs and random state."""
    with unchanged(model, given):
        if random is not None:
            set_random_state(random)
        yield


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Return the states of torch's generators, of the CPU and of the current CUDA device if in use; without a sync."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Restore what ``random_state`` returned."""
    torch.set_rng_state(state[0])
    for one in state[1]:
        torch.cuda.set_rng_state(one)

"""Gives an ``Accelerator`` that runs without autocast a scaler for fp16; accelerate/accelerator.py, 1.15.

Before: ``Accelerator(mixed_precision="fp16")``, a scaler and autocast, on a GPU only. After: the scaler alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from amp_graph.errors import ScaleError
from amp_graph.scaling.grad_scaler import GradScaler


def give_scaler(accelerator: Any, scaler: torch.amp.GradScaler | None = None) -> torch.amp.GradScaler:
    """Make ``accelerator`` scale losses, unscale before it clips, skip bad steps and save the scale; return it.

    Optimizers that it has prepared already get the scaler, too.
    """
    if accelerator.scaler is not None:
        if scaler is None or accelerator.scaler is scaler:
            return accelerator.scaler
        raise ScaleError(
            "accelerate: this Accelerator has a scaler already\n"
            "  fix:   leave scaler= out, or Accelerator(mixed_precision='no')"
        )
    made = accelerator.scaler = scaler or GradScaler()

    def unscale_gradients(optimizer: Any = None) -> None:
        given = accelerator._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, (list, tuple)) else [given]:
            while hasattr(one, "accelerator_state"):  # an AcceleratedOptimizer
                one = one.optimizer
            if made._per_optimizer_states[id(one)]["stage"] is OptState.READY:
                made.unscale_(one)

    accelerator.unscale_gradients = unscale_gradients  # accelerate's own does nothing with mixed_precision="no"
    for optimizer in accelerator._optimizers:
        optimizer.__setstate__({"scaler": made})
    return made

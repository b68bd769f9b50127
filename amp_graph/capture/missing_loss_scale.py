"""Warns of fp16 without a loss scale: gradients below 3.0e-08 become 0, so that such a model may learn nothing.

Before: ``loss.backward()``, and gradients of zero. After: an AmpGraphWarning at the first backward, with the lines that
scale the loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from amp_graph.capture.diagnostics import Diagnostics
from amp_graph.errors import warn
from amp_graph.passes.torch_compat.dispatch import is_batched
from amp_graph.passes.torch_compat.optimizers import living
from amp_graph.scaling.loss_scale import LossScale

# The gradient of a loss is 1 and that of outputs under a mean loss less: a larger one was scaled by hand.
LARGEST_UNSCALED = 1.0
FIX = (
    "scaler = amp_graph.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); "
    "or policy 'bf16'"
)


class ScaleCheck:
    """Looks once at a gradient of a model in fp16; ``done``: whether it has."""

    def __init__(self, diagnostics: Diagnostics) -> None:
        self.diagnostics = diagnostics
        self.done = False

    def after(self, results: Any) -> None:
        """Look at the backward of the call that returned ``results``."""
        for one in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(self._at_output)

    def _at_output(self, grad: torch.Tensor) -> None:
        if self.done or type(grad) is not torch.Tensor or grad.layout != torch.strided or not grad.numel():
            return
        if is_batched(grad) or (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        largest = float(torch.linalg.vector_norm(grad.detach(), math.inf))
        if not 0 < largest < math.inf:  # a masked loss, or an overflow
            return
        self.done = True
        if largest <= LARGEST_UNSCALED and not has_scaler():
            what = "trains in fp16, and nothing in this process scales losses: gradients below 3.0e-08 become 0"
            self.diagnostics.note(f"{what}; scale the loss")
            warn(f"amp_graph: {type(self.diagnostics.model).__name__} {what}\n  fix:   {FIX}")


def has_scaler() -> bool:
    """Return whether a loss scale exists: a gradient scaler, ours or torch's, or that of a TrainStep."""
    return bool(living(LossScale)) or any(one.is_enabled() for one in living(torch.amp.GradScaler))

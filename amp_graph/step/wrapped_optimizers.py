"""Unwraps optimizers of other libraries if their step only calls the inner one; else refuses them with a fix.

Before: ``TrainStep(model, loss_fn, accelerator.prepare(optimizer))``, an AttributeError amid the step's making. After:
the step is that of the optimizer inside.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from amp_graph.errors import CaptureError
from amp_graph.scaling.mixed_precision_optimizer import MixedPrecisionOptimizer

# The attributes of wrappers that hold the inner optimizer: accelerate, Lightning, Lookahead of timm and others.
INSIDE = ("optimizer", "_optimizer", "base_optimizer", "_base_optimizer", "optim", "_optim")


def unwrapped(optimizer: Any) -> Any:
    """Return the inner optimizer if the wrapper's step only calls the inner step, else ``optimizer``.

    Raises CaptureError for wrappers that are not torch optimizers, and for those that may skip steps.
    """
    name = next((name for name in INSIDE if isinstance(getattr(optimizer, "__dict__", {}).get(name), Optimizer)), "")
    own_hooks = isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in optimizer.__dict__
    if own_hooks or isinstance(optimizer, MixedPrecisionOptimizer):  # others are refused elsewhere
        return optimizer  # its own step is called
    if name and _is_of_accelerate(optimizer):
        _refuse_what_leaves_steps_out(optimizer)
        return optimizer.__dict__[name]
    if name:
        kind, inner = type(optimizer).__name__, type(optimizer.__dict__[name]).__name__
        public = "optimizer" if isinstance(getattr(type(optimizer), "optimizer", None), property) else name
        raise CaptureError(
            f"TrainStep: a {kind} wraps a {inner}, and its step() may do more than call the inner step()\n"
            "  legal: a torch.optim.Optimizer, made by Optimizer.__init__\n"
            f"  fix:   TrainStep(model, loss_fn, optimizer.{public}, ...), the inner optimizer"
        )
    if isinstance(optimizer, Optimizer):
        raise CaptureError(
            f"TrainStep: a {type(optimizer).__name__} that Optimizer.__init__ did not make: it has no hooks\n"
            f"  fix:   call super().__init__(params, defaults) in {type(optimizer).__name__}.__init__"
        )
    return optimizer


def _is_of_accelerate(optimizer: Any) -> bool:
    kind = type(optimizer)
    return (kind.__module__, kind.__qualname__) == ("accelerate.optimizer", "AcceleratedOptimizer")


def _refuse_what_leaves_steps_out(optimizer: Any) -> None:
    """Raise CaptureError if accelerate scales or accumulates gradients; accelerate/optimizer.py, 1.15."""
    if getattr(optimizer, "scaler", None) is not None:
        raise CaptureError(
            "TrainStep: accelerate scales losses for this optimizer, and a TrainStep scales them, too\n"
            "  fix:   Accelerator(mixed_precision='no'), and TrainStep(model, loss_fn, optimizer, 'fp16')"
        )
    batches = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if batches != 1:
        raise CaptureError(
            f"TrainStep: accelerate calls this optimizer once in {batches} batches, and a TrainStep updates at each\n"
            f"  fix:   Accelerator(gradient_accumulation_steps=1), and TrainStep(..., micro_batches={batches})"
        )

"""Losses that need nothing but the model's output: their targets are fixed functions of its shape.

All of them compute in fp32 at least, so that what a comparison finds is the model's error and not the loss's.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F


def full(t: torch.Tensor) -> torch.Tensor:
    """Raise a low-precision tensor to fp32; leave fp32 and fp64 alone."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def float_leaves(obj: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point (and complex) tensors of a nested output, in order."""
    if isinstance(obj, torch.Tensor):
        if obj.is_floating_point() or obj.is_complex():
            yield obj
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from float_leaves(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            yield from float_leaves(value)
    elif is_dataclass(obj):
        for field in fields(obj):
            yield from float_leaves(getattr(obj, field.name))


def wave(like: torch.Tensor) -> torch.Tensor:
    """Fixed values in [-1, 1] of the same shape: a target, or weights, without a pattern that cancels."""
    steps = torch.arange(like.numel(), device=like.device, dtype=torch.float64)
    return torch.sin(1.7 * steps + 0.3).reshape(like.shape).to(like.dtype)


def classify(logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the last dimension."""
    logits = full(logits).flatten(0, -2)
    target = (torch.arange(len(logits), device=logits.device) * 7 + 3) % logits.shape[-1]
    return F.cross_entropy(logits, target)


def segment(logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the channels of an image or a signal (N, C, ...)."""
    return classify(logits.movedim(1, -1))


def regress(out: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    out = full(out)
    return F.mse_loss(out, wave(out))


def binary(logits: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy with logits."""
    logits = full(logits)
    return F.binary_cross_entropy_with_logits(logits, (wave(logits) > 0).to(logits.dtype))


def project(out: Any) -> torch.Tensor:
    """Weighted mean of every float tensor in the output, plus squares so that no gradient is constant."""
    total = 0.0
    for leaf in map(full, float_leaves(out)):
        leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        total = total + (leaf * wave(leaf)).mean() + 0.1 * leaf.square().mean()
    return total


def own(out: Any) -> torch.Tensor:
    """The loss that the model computed itself."""
    return out["loss"] if isinstance(out, dict) else out.loss if hasattr(out, "loss") else out


def of(name: str, loss: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Apply `loss` to one field of the output: `of("logits", classify)`."""
    return lambda out: loss(out[name] if isinstance(out, dict) else getattr(out, name))

"""Substitutes, with the same results, for torch functions that read tensor values while they are traced.

Before: ``nn.TransformerEncoder(x, mask=m)``, which checks whether ``m`` is causal, and therefore cannot be captured.
After: the mask is applied as it is. Exactness: rounding-equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def is_compiling() -> bool:
    """Return what ``torch.compiler.is_compiling`` returns in eager mode."""
    return False


def mask_as_given(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the caller says that a mask is causal; if unspecified, torch compares it to a causal one.

    A mask known to be causal is not applied: a faster kernel computes the same result.
    """
    return is_causal is True


def masked_select_of_broadcast(input: Tensor, mask: Tensor) -> Tensor:
    """Return ``torch.masked_select`` of tensors of one shape.

    torch/_subclasses/fake_impls.py bounds the count by the tensor's own elements, and Dynamo asserts this in the graph:
    a mask larger than its tensor fails there.
    """
    input, mask = torch.broadcast_tensors(input, mask)
    selected: Tensor = torch.ops.aten.masked_select.default(input, mask)
    return selected


def batch_norm_of_averages(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``F.batch_norm`` for a ``momentum`` that is one over a tensor's count: ``nn.BatchNorm2d(momentum=None)``.

    The kernel needs it as a number, which a graph does not know; the graph averages in the batch's statistics itself.
    """
    if running_mean is None or running_var is None or not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)
    factor = torch.scalar_tensor(momentum, dtype=running_mean.dtype, device=running_mean.device)
    running_mean.lerp_(mean, factor)
    running_var.lerp_(var, factor)
    return result

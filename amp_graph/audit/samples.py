"""Samples of large tensors, the same ones each time: no random number is drawn.

Before: a tensor of 50 million elements. After: ``sample(t, 1 << 18)``, every 191st of them.
"""

from __future__ import annotations

import math

from torch import Tensor

from amp_graph.passes.torch_compat.dispatch import is_wrapper


def sample(tensor: Tensor, most: int) -> Tensor:
    """Return at most ``most`` elements of ``tensor``, in one dimension: itself or every n-th, over all its columns."""
    flat = tensor.reshape(-1)
    apart = -(-flat.numel() // most)
    while apart > 1 and any(math.gcd(apart, size) > 1 for size in tensor.shape[1:]):
        apart += 1
    return flat[::apart] if apart > 1 else flat


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process has; any other tensor itself."""
    return tensor.to_local() if is_wrapper(tensor) and hasattr(tensor, "to_local") else tensor

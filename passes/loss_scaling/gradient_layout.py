"""Gradients in the memory layout of what they update.

Before: a gradient in channels_last beside a contiguous weight, which fused kernels go through by memory, as if both
were one row of numbers. After: the gradient in the weight's strides.
"""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out_as(like: Tensor, tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the strides of ``like``, as autograd lays out a ``.grad``; copied where it has others.

    What has no strides, as sparse gradients have none, is returned as it is.
    """
    if tensor.layout is not torch.strided or lies_as(like, tensor):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def lies_as(like: Tensor, tensor: Tensor) -> bool:
    """Say whether ``tensor``, of the same shape, has its elements in the order of those of ``like``.

    A 1x1 convolution's weight is contiguous and channels_last at once: no step is made along a dimension of one.
    """
    steps, others = tensor.stride(), like.stride()
    return steps == others or all(a == b or n == 1 for a, b, n in zip(steps, others, like.shape, strict=True))

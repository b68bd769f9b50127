"""Matmuls and convolutions with dimensions zero-padded for tensor cores, and the results narrowed again.

Before: ``F.linear(x, w)`` with ``w`` [50257, 768].
After: ``F.linear(x, F.pad(w, (0, 0, 0, 7)))[..., :50257]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.registry import own_functions

own_functions(__name__)

MULTIPLE = 8  # elements of 16 bits
IMAGE = 4  # channels of a first convolution for which cuDNN has special kernels


def missing(size: int) -> int:
    """Return the padding of ``size`` to the next multiple of 8."""
    return -size % MULTIPLE


def missing_channels(channels: int) -> int:
    """Return the channel padding of an image: 3 to 4, more than 4 to the next multiple of 8; 1 and 2 stay."""
    return IMAGE - channels if channels == IMAGE - 1 else missing(channels) if channels > IMAGE else 0


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dense: bool) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, computed with both dimensions of ``weight`` padded to multiples of 8.

    x [..., in], weight [out, in], bias [out], of one dtype. ``dense``: return the layout of ``linear``; else a view of
    the padded result. Zeros do not change any sum: gradients are those of ``linear``.
    """
    columns, rows = missing(weight.shape[1]), missing(weight.shape[0])
    if columns:
        x = F.pad(x, (0, columns))
    if rows and bias is not None:
        bias = F.pad(bias, (0, rows))
    out = F.linear(x, F.pad(weight, (0, columns, 0, rows)), bias)
    if not rows:
        return out
    narrow = out[..., : weight.shape[0]]
    return narrow.contiguous() if dense else narrow


def aligned_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int] | str,
    dilation: list[int],
) -> Tensor:
    """Return ``F.conv2d`` of x [batch, in, height, width], computed with zero-padded input channels."""
    short = missing_channels(x.shape[1])
    layout = torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    x = F.pad(x, (0, 0, 0, 0, 0, short)).contiguous(memory_format=layout)
    return F.conv2d(x, F.pad(weight, (0, 0, 0, 0, 0, short)), bias, stride, padding, dilation)

"""The residual sum and norm of ``add_norm_kernel`` by torch's operations, on devices where no kernel of ours runs.

Before: a converted model that is moved to such a device.
After: ``norm_by_torch(x, branch, ...)``: the same results in the same order, several passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm_by_torch(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    width: int,
    eps: float,
    low: torch.dtype,
    wants_low: bool,
    wants_full: bool,
    centered: bool,
) -> list[Tensor]:
    """Return what ``residual_norm`` does."""
    total = x if branch is None else x + branch
    rows = total.float().reshape(total.numel() // max(1, width), width)
    mean = rows.mean(1, keepdim=True) if centered else rows.new_zeros((rows.shape[0], 1))
    rows = rows - mean
    scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    rows = rows * scale
    rows = rows if weight is None else rows * weight.reshape(width)
    wide = (rows if bias is None else rows + bias.reshape(width)).view(x.shape)
    made = [torch.stack([mean.squeeze(1), scale.squeeze(1)])]
    made += [] if branch is None else [total]
    return made + [wide.to(low)] * wants_low + [wide] * wants_full


def norm_gradients_by_torch(
    grads: list[Tensor],
    grad_sum: Tensor | None,
    total: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    width: int,
    low: torch.dtype,
    wants_full: bool,
    wants_low: bool,
    wants_weight: bool,
    wants_bias: bool,
    centered: bool,
) -> list[Tensor]:
    """Return what ``residual_norm_backward`` does."""
    shape = (total.numel() // max(1, width), width)
    grad = torch.stack([g.float() for g in grads]).sum(0).reshape(shape)
    mean, scale = stats.unsqueeze(2)
    normed = (total.float().reshape(shape) - mean) * scale
    own = grad if weight is None else grad * weight.float().reshape(width)
    found = own - normed * (own * normed).mean(1, keepdim=True)
    found = (found - own.mean(1, keepdim=True) if centered else found) * scale
    found = found.view(total.shape)
    found = found if grad_sum is None else found + grad_sum
    made = [found] * wants_full + [found.to(low)] * wants_low
    return made + [(grad * normed).sum(0)] * wants_weight + [grad.sum(0)] * wants_bias

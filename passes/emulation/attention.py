"""Scaled dot-product attention with the roundings of the GPU's fused kernels.

FlashAttention and the memory-efficient kernel keep scores and the softmax's sum in fp32. They round the probabilities,
before they are divided by their sum, to low precision for the product with the values; in backward they round the
gradient of the scores to low precision for the products with queries and keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.emulation.rounded_calls import is_low


class _RoundForward(torch.autograd.Function):
    """Rounds a value to a low dtype; its gradient stays fp32."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _RoundBackward(torch.autograd.Function):
    """Returns a value as it is; rounds its gradient to a low dtype."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype).to(gradients[0].dtype), None


def emulated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of low-precision operands as a GPU computes it; of others, as torch does."""
    low = query.dtype
    if not is_low(query):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = query.float(), key.float(), value.float()
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = _RoundBackward.apply(_masked(scores, attn_mask, is_causal), low)
    most = scores.detach().amax(-1, keepdim=True)
    unscaled = (scores - most.masked_fill(most == -math.inf, 0.0)).exp()
    total = unscaled.sum(-1, keepdim=True)
    kept = F.dropout(unscaled, dropout_p) if dropout_p else unscaled
    made = _RoundForward.apply(kept, low) @ v / total.masked_fill(total == 0, 1.0)  # 0 for rows that see nothing
    return made.to(low)


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)

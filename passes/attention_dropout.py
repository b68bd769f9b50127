"""What converted graphs call for attention that drops some of its probabilities.

Before: ``scaled_dot_product_attention(q, k, v, dropout_p=0.1)``. After: ``attention_dropped(q, k, v, dropout_p=0.1)``.
A module of its own, as it draws: ``verify`` compares what is drawn with what was drawn before.
"""

from __future__ import annotations

from torch import Tensor

from amp_graph.passes.attention_backward import attention_low


def attention_dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``attention_low``, with dropout."""
    return attention_low(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

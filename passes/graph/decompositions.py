"""Decompositions of fused operators: of inference, for which torch has none, and of products that add a value.

Before: ``_transformer_encoder_layer_fwd(src, ...)``, which computes everything in one precision. After: linears,
attention, norms and sums, each with its own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.torch_compat.operators import ENCODER_LAYER


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Return the result of ``aten::_transformer_encoder_layer_fwd`` for a dense ``src`` [batch, length, embed_dim].

    mask: True hides a position; a floating-point mask is added to the scores, as in training. (The operator treats any
    number but 0 as True: the same for -inf, NaN for most other numbers.) mask_type 0: [length, length], 1:
    [batch, length], 2: full shape.
    Source: aten/src/ATen/native/transformers/transformer.cpp.
    """
    seen = None
    if mask is not None:
        seen = mask if mask.is_floating_point() else mask.to(torch.bool).logical_not()
        seen = seen[None, None] if mask_type == 0 else seen[:, None, None, :] if mask_type == 1 else seen

    def attend(x: Tensor) -> Tensor:
        parts = F.linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=seen)
        return F.linear(out.transpose(1, 2).flatten(-2), proj_weight, proj_bias)

    def feed(x: Tensor) -> Tensor:
        h = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(h) if use_gelu else F.relu(h), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(norm_1(src))
        return src + feed(norm_2(src))
    src = norm_1(src + attend(src))
    return norm_2(src + feed(src))


def added_to_product(addend: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return the result of ``aten::baddbmm`` and ``aten::addmm`` by a product and a sum; beta 0 ignores ``addend``."""
    if beta == 0:
        return (a @ b) * alpha
    return torch.add(addend if beta == 1 else addend * beta, a @ b, alpha=alpha)


ADDING = (torch.ops.aten.baddbmm.default, torch.ops.aten.addmm.default)
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    ENCODER_LAYER: encoder_layer,
    **dict.fromkeys(ADDING, added_to_product),
}

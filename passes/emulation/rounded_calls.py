"""Calls that compute in fp32 on low-precision operands and round as the GPU's kernels do: products, and attention.

Before: ``linear(x_fp16, w_fp16)``. After: ``linear(x.float(), w.float()).half()``, whose gradients are sums in fp32 as
well, each rounded to fp16 once. In attention, FlashAttention and the memory-efficient kernel keep scores and the
softmax's sum in fp32. They round the probabilities, before they are divided by their sum, to low precision for the
product with the values; in backward they round the gradient of the scores for the products with queries and keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from amp_graph.passes.graph.node_info import HALVES

Dtypes = tuple[torch.dtype | None, ...]  # of the results of a call, in the order of their leaves
BIAS = 2  # the position of a convolution's bias


def is_low(leaf: Any) -> bool:
    """Say whether ``leaf`` is a tensor in low precision."""
    return isinstance(leaf, Tensor) and leaf.dtype in HALVES


def widened(leaf: Any) -> Any:
    """Return a low-precision tensor in fp32; anything else as it is."""
    return leaf.float() if is_low(leaf) else leaf


def _rounded(made: Any, dtypes: Dtypes) -> Any:
    leaves, spec = tree_flatten(made)
    if len(leaves) != len(dtypes):
        return made
    return tree_unflatten([_to(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)], spec)


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and dtype in HALVES else leaf


@functools.cache
def emulated(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls ``target`` in fp32, and rounds its results to ``dtypes``.

    Operands in fp32 or fp64 alone are computed with as they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_low, tree_leaves((args, kwargs)))):
            return target(*args, **kwargs)
        return _rounded(target(*tree_map(widened, args), **tree_map(widened, kwargs)), dtypes)

    return _named(call, target)


@functools.cache
def emulated_convolution(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls a convolution in fp32, rounds, adds the bias, and rounds again, as cuDNN does.

    cuDNN's convolutions have no bias: torch adds it to their result, which is in low precision by then.
    """
    alone = emulated(target, dtypes)

    def call(*args: Any, **kwargs: Any) -> Any:
        bias = args[BIAS] if len(args) > BIAS else kwargs.get("bias")
        if bias is None or not is_low(bias):
            return alone(*args, **kwargs)
        args = (*args[:BIAS], *(None for _ in args[BIAS : BIAS + 1]), *args[BIAS + 1 :])
        made = alone(*args, **{**kwargs, **({"bias": None} if "bias" in kwargs else {})})
        spatial = (args[1] if len(args) > 1 else kwargs["weight"]).dim() - 2
        return made + bias.reshape(-1, *(1,) * spatial)

    return _named(call, target)


def _named(call: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """Name a function after what it calls, which graphs as text show."""
    name = getattr(target, "__name__", type(target).__name__).replace(".", "_")
    call.__name__ = call.__qualname__ = f"emulated_{name}"
    return call


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

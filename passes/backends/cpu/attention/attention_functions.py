"""Attention for converted graphs, by compiled C.

Before: ``scaled_dot_product_attention(q, k, v)``, whose CPU kernel takes several times longer for backward than for
forward in bf16.
After: ``attention_low(q, k, v)``, whose backward recomputes the probabilities.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention import dropout_bits as bits
from amp_graph.passes.graph.call_arguments import attention_kernel_is_profitable
from amp_graph.passes.native.operator_library import called, define_as_typed
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.dispatch import in_forward_mode
from amp_graph.passes.torch_compat.operators import scaled_dot_product_attention_math

own_functions(__name__)


def attention_low(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A faster ``F.scaled_dot_product_attention`` of low-precision CPU tensors.

    query: [batch, heads, length, width]; key, value: [batch, heads or a divisor of it, keys, width]; attn_mask: bool or
    float, of 2 or 4 dimensions. What the kernel does not support goes to torch's own function, or to its formula where
    the mask may hide rows, whose gradients torch's function computes inexactly.

    Scores, probabilities and their gradients are fp32, as inside torch's kernel. Dropout draws what torch's own draws.
    """
    query, key, value = inputs = _in_rows(query), _in_rows(key), _in_rows(value)
    masked = attn_mask is not None and attn_mask.requires_grad
    trains = torch.is_grad_enabled() and (masked or any(t.requires_grad for t in inputs))
    queries = None if trains or dropout_p else query.shape[-2]
    if not _kernel_takes(inputs, attn_mask, grouped=enable_gqa, queries=queries):
        hides = trains and attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float16)
        # torch's kernel has no forward-mode derivative, unlike attention that was written out.
        torchs = by_formula if in_forward_mode() or hides else F.scaled_dot_product_attention
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    given = (query, key, value, attn_mask, is_causal, scale, dropout_p)
    return _Attention.apply(*given) if trains else called(kernel.forward, *given[:6], *_drawn(query, key, dropout_p))


def by_formula(*given: Any, **options: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` by separate operations in fp32, rounded once."""
    found: Tensor = scaled_dot_product_attention_math(*given, **options)[0]
    return found


def _in_rows(heads: Tensor) -> Tensor:
    """Make each head's vectors contiguous, as all kernels need them: torch leaves other layouts to other kernels."""
    return heads if heads.dim() != 4 or heads.stride(-1) == 1 else heads.contiguous()


def _drawn(query: Tensor, key: Tensor, p: float) -> tuple[Tensor | None, float]:
    """Return the bits of the probabilities that a dropout of ``p`` keeps, and ``p``."""
    if not p:
        return None, p
    return called(bits.dropout_bits, query[..., 0], p, key.shape[2]), p


def _kernel_takes(inputs: tuple[Tensor, ...], mask: Tensor | None, *, grouped: bool, queries: int | None) -> bool:
    """Say whether our kernel runs on these tensors; ``queries``: without gradients, their number."""
    query, key, value = inputs
    if leaves_to_torch(*inputs, mask) or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if any(t.dim() != 4 or t.stride(-1) != 1 or not t.numel() for t in inputs):
        return False
    if not (grouped or key.shape[1] in (1, query.shape[1])) or (mask is not None and mask.dim() not in (2, 4)):
        return False
    return attention_kernel_is_profitable(query.device.type, query.dtype, queries) and kernel.takes(query, key, value)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropped: float,
    ) -> Tensor:
        kept, _ = _drawn(query, key, dropped)
        ctx.save_for_backward(query, key, value, mask, kept)
        ctx.given = causal, scale, dropped
        return called(kernel.forward, query, key, value, mask, causal, scale, kept, dropped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, kept = ctx.saved_tensors
        causal, scale, dropped = ctx.given
        need, rest = ctx.needs_input_grad[:4], (None,) * 3
        if not is_plain(grad) and kernel.backward_library() is not None:  # it is compiled here at the earliest
            given = (query, key, value, mask, causal, scale, kept, dropped)
            if need[3]:
                return *called(kernel.backward_with_mask, grad, *given), *rest
            return *called(kernel.backward, grad, *given), None, *rest
        again = functools.partial(_by_products, causal=causal, scale=scale, kept=kept, dropped=dropped)
        return *gradients_by_torch(again, (query, key, value, mask), need, (grad,)), *rest


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: Tensor | None,
    dropped: float,
) -> Tensor:
    """Return attention by fp32 operations that each have derivatives, rounded once."""
    groups = query.shape[1] // max(1, key.shape[1])
    wide = [query.float(), *(t.float().repeat_interleave(groups, 1) for t in (key, value))]
    scores = (wide[0] * scale) @ wide[1].mT
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu_(1)
    if mask is not None:
        scores = scores + mask
        dead = (mask == -math.inf).all(-1, keepdim=True)
        chances = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    else:
        chances = scores.softmax(-1)
    if kept is not None:
        chances = chances * bits.kept_of(kept, chances.numel()).view(chances.shape) / (1 - dropped)
    return (chances @ wide[2]).to(query.dtype)


# One operator each, so that a traced graph (TrainStep's, a compiler's) has one node and not the loop.
define_as_typed(kernel.forward, kernel.result_like, name="attention_forward")
define_as_typed(kernel.backward, kernel.gradients_like, name="attention_backward")
define_as_typed(
    kernel.backward_with_mask,
    lambda query, key, value, mask: (*kernel.gradients_like(query, key, value), mask.new_empty(mask.shape)),
    name="attention_backward_with_mask",
)

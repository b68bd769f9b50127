"""Attention for converted graphs: compiled C; or torch's forward, and a backward of matmuls.

Before: ``scaled_dot_product_attention(q, k, v)``, whose CPU kernel takes several times longer for backward than for
forward in bf16.
After: ``attention_low(q, k, v)``, whose backward recomputes the probabilities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention import dropout_bits as bits
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.profitability.thresholds import attention_kernel_is_profitable
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import softmax_backward
from amp_graph.passes.torch_compat.dispatch import in_forward_mode, is_seen
from amp_graph.passes.torch_compat.double_backward import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.onednn import flash_attention_cpu

own_functions(__name__)

# Attention scores per block: with this many, all that backward needs at a time stays in a core's cache.
CHUNK = 1 << 18


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
    float, of 2 or 4 dimensions. What the kernels do not support goes to torch's own function; only ours supports a mask
    with a gradient.

    Scores, probabilities and their gradients are fp32, as inside torch's kernel; where that runs forward, the result is
    bit-equal. Dropout draws what torch's own draws.
    """
    query, key, value = inputs = _in_rows(query), _in_rows(key), _in_rows(value)
    masked = attn_mask is not None and attn_mask.requires_grad
    trains = torch.is_grad_enabled() and (masked or any(t.requires_grad for t in inputs))
    profitable = _by_ours(*inputs) if dropout_p else trains or _by_ours(*inputs, queries=query.shape[-2])
    if not _kernels_take(inputs, attn_mask, enable_gqa) or not profitable:
        # torch's kernel has no forward-mode derivative, unlike attention that was written out.
        torchs = _one_by_one if in_forward_mode() else F.scaled_dot_product_attention
        return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    given = (query, key, value, attn_mask, is_causal, scale, dropout_p)
    return _Attention.apply(*given) if trains else _forward(query, *given[1:6], *_drawn(query, key, dropout_p))


def _one_by_one(*given: Any, **options: Any) -> Tensor:
    found: Tensor = torch.ops.aten._scaled_dot_product_attention_math(*given, **options)[0]
    return found


def by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """``F.scaled_dot_product_attention`` by separate operations, as in the formula; attn_mask: floats."""
    chances = (query @ key.mT * scale + attn_mask).softmax(-1).to(value.dtype)
    return (F.dropout(chances, dropout_p) if dropout_p else chances) @ value


def _in_rows(heads: Tensor) -> Tensor:
    """Make each head's vectors contiguous, as all kernels need them: torch leaves other layouts to other kernels."""
    return heads if heads.dim() != 4 or heads.stride(-1) == 1 else heads.contiguous()


def _by_ours(query: Tensor, key: Tensor, value: Tensor, queries: int | None = None) -> bool:
    return attention_kernel_is_profitable(query.device.type, query.dtype, queries) and kernel.takes(query, key, value)


def _drawn(query: Tensor, key: Tensor, p: float) -> tuple[Tensor | None, float]:
    """Return the bits of the probabilities that a dropout of ``p`` keeps, and ``p``."""
    if not p:
        return None, p
    calls: Any = OPS if is_seen(query) else bits
    return calls.dropout_bits(query[..., 0], p, key.shape[2]), p


def _kernels_take(inputs: tuple[Tensor, ...], mask: Tensor | None, grouped: bool) -> bool:
    """Say whether ``F.scaled_dot_product_attention`` runs its flash kernel for CPU on these tensors."""
    if leaves_to_torch(*inputs, mask) or not torch.backends.cuda.flash_sdp_enabled():
        return False
    query, key, value = inputs
    if mask is not None and mask.dim() not in (2, 4):
        return False
    if mask is not None and mask.requires_grad and not _by_ours(query, key, value):
        return False
    if query.dim() != 4 or key.shape != value.shape or not (grouped or _heads_meet(query, key)):
        return False
    return all(t.dim() == 4 and t.shape[-1] == query.shape[-1] and t.stride(-1) == 1 and t.numel() > 0 for t in inputs)


def _heads_meet(query: Tensor, key: Tensor) -> bool:
    """Say whether each query head has a key head, or all share one, which torch's kernel does not support."""
    alone = key.dim() == 4 and key.shape[1] == 1 and query.shape[0] == key.shape[0] and _by_ours(query, key, key)
    return alone or query.shape[:2] == key.shape[:2]


def _forward(query: Tensor, *given: Any) -> Tensor:
    """Call the kernel, through its operator only if a mode observes it: the dispatcher takes time."""
    made: Tensor = (OPS.attention_forward if is_seen(query) else kernel.forward)(query, *given)
    return made


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
        if _by_ours(query, key, value):
            return _forward(query, key, value, mask, causal, scale, kept, dropped)
        return flash_attention_cpu(query, key, value, mask, causal, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, kept = ctx.saved_tensors
        causal, scale, dropped = ctx.given
        need, rest = ctx.needs_input_grad[:4], (None,) * 3
        if not is_plain(grad):
            seen, given = is_seen(query), (grad, query, key, value, mask, causal, scale, kept, dropped)
            if need[3]:
                return *(OPS.attention_backward_with_mask if seen else kernel.backward_with_mask)(*given), *rest
            return *(OPS.attention_backward if seen else attention_backward)(*given), None, *rest
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
        scores = scores + _causal_bias(query.shape[2], key)
    if mask is not None:
        scores = scores + mask
        dead = (mask == -math.inf).all(-1, keepdim=True)
        chances = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    else:
        chances = scores.softmax(-1)
    if kept is not None:
        chances = chances * bits.kept_of(kept, chances.numel()).view(chances.shape) / (1 - dropped)
    return (chances @ wide[2]).to(query.dtype)


def _causal_bias(length: int, key: Tensor) -> Tensor:
    return torch.full((length, key.shape[2]), -math.inf, dtype=torch.float32, device=key.device).triu_(1)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    kept: Tensor | None = None,
    dropped: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, of their dtypes and shapes, for the output's gradient ``grad``."""
    if _by_ours(query, key, value):
        return kernel.backward(grad, query, key, value, mask, causal, scale, kept, dropped)
    return _backward_by_products(grad, query, key, value, mask, causal, scale)


def _backward_by_products(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by torch's matmuls.

    Processes a few heads at a time, so that at most ``CHUNK`` probabilities exist at once. The queries of heads that
    share a key are concatenated to one head, so that the matmul sums its gradient.
    """
    groups = query.shape[1] // max(1, key.shape[1])
    length, keys = query.shape[2], key.shape[2]
    grad, query = (t.unflatten(1, (key.shape[1], groups)).flatten(2, 3) for t in (grad, query))
    made = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    bias, dead = torch.zeros(1, 1, 1, device=query.device), None
    if causal:
        bias = _causal_bias(length, key).repeat(groups, 1)
    for part in _parts(query, keys):
        g, q, k, v = (t[part].flatten(0, 1) for t in (grad, query, key, value))
        if mask is not None:
            whole = mask.expand(query.shape[0], groups * query.shape[1], length, keys)
            bias = whole.unflatten(1, (key.shape[1], groups))[part].flatten(2, 3).flatten(0, 1).float()
            dead = (bias == -math.inf).all(-1, keepdim=True)
        for all_heads, found in zip(made, _block(g, q, k, v, bias, dead, scale), strict=True):
            all_heads[part] = found.view(all_heads[part].shape)
    return made[0].unflatten(2, (groups, length)).flatten(1, 2), made[1], made[2]


def _parts(query: Tensor, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of batches and of heads with at most ``CHUNK`` probabilities, or those of one head."""
    batch, heads, rows, _ = query.shape
    at_once = max(1, CHUNK // max(1, rows * keys))
    for b in range(0, batch, max(1, at_once // max(1, heads))):
        for h in range(0, heads, max(1, min(heads, at_once))):
            yield slice(b, b + max(1, at_once // heads)), slice(h, h + min(heads, at_once))


def _block(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dead: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a few heads, all [heads, rows, width].

    ``bias`` (fp32) is added to the scores; ``dead`` rows, which are fully masked, attend to nothing, as in the kernel.
    """
    low = query.dtype
    chances = torch.baddbmm(bias, query.float(), key.float().mT, alpha=scale).softmax(-1)
    if dead is not None:
        chances.masked_fill_(dead, 0)
    dvalue = torch.bmm(chances.to(low).mT, grad)
    dchances = torch.bmm(grad.float(), value.float().mT)
    dscores = softmax_backward(dchances, chances).to(low)
    return torch.bmm(dscores, key).mul_(scale), torch.bmm(dscores.mT, query).mul_(scale), dvalue


# One operator each, so that a traced graph (TrainStep's, a compiler's) has one node and not the loop.
define_as_typed(kernel.forward, kernel.result_like, name="attention_forward")
define_as_typed(attention_backward, kernel.gradients_like)
define_as_typed(
    kernel.backward_with_mask,
    lambda query, key, value, mask: (*kernel.gradients_like(query, key, value), mask.new_empty(mask.shape)),
    name="attention_backward_with_mask",
)

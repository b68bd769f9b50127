"""Attention between guard pages: forward, and the gradients of its operands and of its mask."""

import math

import torch

from amp_graph.passes.backends.cpu.attention import attention_kernel, dropout_bits
from tests.guard.case import BF16, FP32, drawn, op, over, same

QUERIES = (0, 1, 3, 17, 33, 290)
KEYS = (0, 1, 3, 17, 33, 65)
MASKS = ("none", "causal", "fp32", "bf16", "row", "batch", "dropout")


def _heads(batch, heads, rows, width, apart, scale=1.0):
    """[batch, heads, rows, width]; ``apart``: with the heads of a row side by side in memory, as linears leave them."""
    if apart:
        return drawn(batch, rows, heads, width, scale=scale).transpose(1, 2)
    return drawn(batch, heads, rows, width, scale=scale)


def _mask(kind, batch, heads, queries, keys):
    made = {
        "fp32": lambda: drawn(queries, keys, dtype=FP32),
        "bf16": lambda: drawn(batch, heads, queries, keys),
        "row": lambda: drawn(1, 1, queries, 1, dtype=FP32),
        "batch": lambda: drawn(batch, 1, 1, keys, dtype=FP32),
    }.get(kind, lambda: None)()
    if made is not None and kind == "fp32" and keys > 1:
        made[:, 1::2] = -math.inf
    return made


def _exact(q, k, v, mask, causal, scale, kept):
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.mT * scale
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores + torch.full(scores.shape[2:], -math.inf).triu(1)
    dead = (scores == -math.inf).all(-1, keepdim=True)
    chances = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return (chances if kept is None else chances * kept) @ v


@over(
    tiled=True,
    batch=(0, 2),
    groups=(1, 2),
    queries=QUERIES,
    keys=KEYS,
    width=(2, 16, 34, 64),
    kind=MASKS,
    apart=(True, False),
)
def attention(batch, groups, queries, keys, width, kind, apart):
    if attention_kernel.library() is None:
        return
    heads = 2 * groups
    q = _heads(batch, heads, queries, width, apart)
    k, v = _heads(batch, 2, keys, width, apart), _heads(batch, 2, keys, width, apart, 0.5)
    mask, causal, scale, kept, noise, p = (
        _mask(kind, batch, heads, queries, keys),
        kind == "causal",
        0.3,
        None,
        None,
        0.0,
    )
    if kind == "dropout":
        p = 0.25
        kept = dropout_bits.dropout_bits(q[..., 0], p, keys)
        noise = dropout_bits.kept_of(kept, batch * heads * queries * keys).double().div(1 - p)
        noise = noise.view(batch, heads, queries, keys)
    found = op("attention_forward")(q, k, v, mask, causal, scale, kept, p)
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    if mask is not None:
        inputs.append(mask.double().requires_grad_())
    with torch.enable_grad():
        wanted = _exact(*inputs[:3], inputs[3] if mask is not None else None, causal, scale, noise)
        grad = _heads(batch, heads, queries, width, apart, 0.5)
        exact = torch.autograd.grad(wanted, inputs, grad.double())
    same(found, wanted.detach(), 2.0**-6)
    given = (grad, q, k, v, mask, causal, scale, kept, p)
    for name, one, other in zip("qkv", op("attention_backward")(*given), exact, strict=False):
        same(one, other, 2.0**-5, f"gradient of {name}")
    if mask is not None:
        for name, one, other in zip("qkvm", op("attention_backward_with_mask")(*given), exact, strict=True):
            same(one, other, 2.0**-5, f"gradient of {name} with a mask")


assert BF16.itemsize == 2, "what the kernel takes"

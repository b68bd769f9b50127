"""One cast for several readers, which sums their gradients in fp32."""

from __future__ import annotations

from typing import Any

import torch

from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.autograd import is_plain, leaves_to_torch

own_functions(__name__)


class _SharedCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
        ctx.full = full
        cast = x.to(dtype)
        copies = [cast, *[cast.view_as(cast) for _ in range(low - 1)]]
        return (x.view_as(x), *copies) if full else tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, None
        total = given[0]
        if len(given) == 1:
            return total.float(), None, None, None
        if is_plain(*given):  # a plain sum, without in-place writes
            return sum((g.float() for g in given[1:]), total.float()), None, None, None
        # The first sum must be fp32, unless a full-precision reader's gradient already is.
        total = total if total.dtype == torch.float32 else total.float()
        for index, grad in enumerate(given[1:]):
            fresh = index > 0 or given[0].dtype != torch.float32
            total = total.add_(grad) if fresh else total.add(grad)
        return total, None, None, None


def shared_cast(x: torch.Tensor, dtype: torch.dtype, low: int, full: bool) -> tuple[torch.Tensor, ...]:
    """Cast ``x`` (fp32) once for ``low`` readers in ``dtype``; with ``full``, ``x`` itself comes first.

    Returns one alias of the low-precision copy per reader. Backward sums the readers' gradients in fp32, as one cast
    per reader would; a plain shared cast would sum, and round, them in ``dtype``.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or leaves_to_torch(x):
        cast = x.to(dtype)
        return (x, *([cast] * low)) if full else (cast,) * low
    return _SharedCast.apply(x, dtype, low, full)

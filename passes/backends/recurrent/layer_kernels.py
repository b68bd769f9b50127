"""A recurrent layer, or several, as one call whose backward is a kernel of its own.

Before: kernels that run a layer and its gradients, and torch's own operations for the same.
After: ``differentiable(Kernels(run, back, by_torch, ...), x, *tensors)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain


class Kernels(NamedTuple):
    """The kernels of a layer whose tensors are ``given``.

    run: of ``given``, returns ``results`` results, and more behind them. back: of the results' gradients, which of
    ``given`` need one, ``given``, and what ``run`` returned at ``keeps``; returns the gradients of ``given``. by_torch:
    of ``given``, the results by torch's own operations, for gradients that are differentiated again or batched.
    """

    run: Callable[..., Any]
    back: Callable[..., Any]
    by_torch: Callable[..., Any]
    results: int
    keeps: tuple[int, ...] = ()


def differentiable(kernels: Kernels, *given: Tensor) -> tuple[Tensor, ...]:
    """Return the results of ``kernels``, with gradients for ``given``."""
    found: tuple[Tensor, ...] = _Layer.apply(kernels, *given)
    return found


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *given: Tensor) -> tuple[Tensor, ...]:
        found, ctx.kernels = kernels.run(*given), kernels
        ctx.save_for_backward(*given, *(found[i] for i in kernels.keeps))
        return tuple(found[: kernels.results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, (_, *need) = ctx.saved_tensors, ctx.needs_input_grad
        given, kept = saved[: len(need)], saved[len(need) :]
        if is_plain(*grads):
            return None, *gradients_by_torch(ctx.kernels.by_torch, given, need, grads)
        made = ctx.kernels.back(grads, need, given, kept)
        return None, *(g if needed else None for g, needed in zip(made, need, strict=True))

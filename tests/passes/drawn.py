"""Random tensors that depend on their shape and a seed alone."""

from collections.abc import Callable, Iterable

import torch


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, rounded to ``dtype``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differentiated(
    function: Callable[..., torch.Tensor],
    given: Iterable[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    grad: torch.Tensor | None = None,
    seed: int = 5,
    like: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the result of ``function`` in ``dtype``, and its gradients for ``grad``, or for one drawn as ``like``."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in given]
    out = function(*leaves)
    grad = drawn(*out.shape, seed=seed, dtype=like or out.dtype) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def drawn_low(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers in bf16, other ones for another shape."""
    return drawn(*shape, dtype=torch.bfloat16, seed=seed + sum(shape))

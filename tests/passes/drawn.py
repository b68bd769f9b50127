"""Random tensors that depend on their shape and a seed alone."""

import torch


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, rounded to ``dtype``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn_low(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers in bf16, other ones for another shape."""
    return drawn(*shape, dtype=torch.bfloat16, seed=seed + sum(shape))

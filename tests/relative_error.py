"""How far tensors are from what they should be, relative to the size of that, in fp64."""

from collections.abc import Iterable

import torch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``."""
    wide = exact.detach().double()
    return ((found.detach().double() - wide).norm() / wide.norm()).item()


def errors(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> list[float]:
    """Return the error of each tensor."""
    return [error(one, true) for one, true in zip(found, exact, strict=True)]

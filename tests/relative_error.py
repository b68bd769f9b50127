"""How far tensors are from what they should be, relative to the size of that, in fp64."""

from collections.abc import Iterable

import torch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``exact``."""
    wide = exact.detach().double()
    return ((found.detach().double() - wide).norm() / wide.norm().clamp_min(1e-300)).item()


def errors(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> list[float]:
    """Return the error of each tensor."""
    return [error(one, true) for one, true in zip(found, exact, strict=True)]


def assert_as_exact(
    found: Iterable[torch.Tensor],
    theirs: Iterable[torch.Tensor],
    exact: Iterable[torch.Tensor],
    times: float = 1.05,
    floor: float = 1e-6,
) -> None:
    """Assert that each tensor has the dtype and the shape of theirs, and an error of at most ``times`` theirs."""
    for one, other, true in zip(found, theirs, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert error(one, true) <= times * error(other, true) + floor, (error(one, true), error(other, true))

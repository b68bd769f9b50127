"""Whether all that a call computes on is finite: then kernels may be called that make something else of NaN.

Before: a convolution, and a pass over its result for the relu, as oneDNN's own relu makes 0 of NaN.
After: ``all_finite((x,), ...)``, once a call, and ``convolution_with_norm(..., finite=True)``, whose relu is oneDNN's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.dispatch import is_in_mode
from amp_graph.passes.torch_compat.storage import StorageWeakRef, storage_of

own_functions(__name__)

AllFinite = Callable[..., bool]


def is_finite(x: Tensor) -> bool:
    """Say whether no element of ``x`` is infinite or NaN, nor their sum: one pass, and never true by mistake."""
    return math.isfinite(x.sum().item())


class FiniteWeights:
    """Which parameters of a model, and copies of them, are finite: asked at every call, looked at once an update."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}  # of copies, by id
        self._bad: dict[Any, StorageWeakRef] = {}  # weights of which what is not finite was made

    def is_kept_finite(self, low: Tensor) -> bool:
        """Say whether ``low`` is finite, a copy that is replaced, or written with a trace, at an update."""
        if low.is_inference():  # cast for this call alone
            return is_finite(low)
        known, version = self._known.get(id(low)), low._version
        if known is None or known[0]() is not low or known[1] != version:
            ended = (key for key, (ref, *_) in list(self._known.items()) if ref() is None)
            for key in ended:
                self._known.pop(key, None)
            known = self._known[id(low)] = (weakref.ref(low), version, is_finite(low))
        return known[2]

    def note(self, key: Any, weight: Tensor, finite: bool) -> None:
        """Take up whether what was made of ``weight`` is finite."""
        if finite:
            self._bad.pop(key, None)
        else:
            self._bad[key] = StorageWeakRef(storage_of(weight))

    @property
    def is_all_finite(self) -> bool:
        """Whether all is finite that was made of weights that still exist."""
        return not self._bad or all(storage.expired() for storage in list(self._bad.values()))

    def drop(self) -> None:
        """Forget all of it."""
        self._known.clear()
        self._bad.clear()


def all_finite_of(weights: FiniteWeights) -> AllFinite:
    """Return what graphs call: ``all_finite(values, kept, before=True)``, whether all these, and before, are finite.

    values: tensors of this call; kept: copies of parameters.
    """

    def all_finite(values: tuple[Tensor, ...], kept: tuple[Tensor, ...] = (), before: bool = True) -> bool:
        if not before or any(map(is_in_mode, values)):
            return False
        return all(map(is_finite, values)) and all(map(weights.is_kept_finite, kept))

    return all_finite


def max_pool_of(weights: FiniteWeights) -> Callable[..., Tensor]:
    """Return what graphs call: ``max_pool_of_finite(x, size, finite)``, ``F.max_pool2d(x, size, 2, size - 2)``.

    x: bf16 images of even height and width that a relu has left; size: 2 or 3; finite: whether ``x`` is, if all weights
    are. The same bits: numbers from 0 up are ordered as the 16-bit integers that they lie as, and the maxima of these
    are taken at four times the rate, first of rows, then of columns.
    """

    def max_pool_of_finite(x: Tensor, size: int, finite: bool) -> Tensor:
        if not finite or not weights.is_all_finite:
            return F.max_pool2d(x, size, 2, size - 2)
        return _maxima(_maxima(x.view(torch.int16), 2, size), 3, size).view(x.dtype)

    return max_pool_of_finite


def _maxima(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the maxima of each two neighbours in ``dim``, and for ``size`` 3 of the one before them, too."""
    pairs = x.unflatten(dim, (-1, 2))
    found = torch.maximum(pairs.select(dim + 1, 0), pairs.select(dim + 1, 1))
    if size == 3 and found.shape[dim] > 1:
        rest = found.narrow(dim, 1, found.shape[dim] - 1)
        torch.maximum(rest, pairs.select(dim + 1, 1).narrow(dim, 0, rest.shape[dim]), out=rest)
    return found

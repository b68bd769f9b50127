"""Check that all inputs of a computation are finite, so that kernels that do not propagate NaN may be called.

Before: a convolution, and a separate pass over its result for the relu, because oneDNN's fused relu turns NaN into 0.
After: ``all_finite((x,), ...)`` once per call, and ``convolution_with_norm(..., finite=True)`` with oneDNN's relu.
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
    """Say whether all elements of ``x``, and their sum, are finite: one pass; may err only towards False."""
    return math.isfinite(x.sum().item())


class FiniteWeights:
    """Which parameters of a model, and copies of them, are finite: asked at every call, checked once per update."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}  # of copies, by id
        self._bad: dict[Any, StorageWeakRef] = {}  # weights from which a non-finite value was made

    def is_kept_finite(self, low: Tensor) -> bool:
        """Say whether ``low`` is finite. An update replaces this copy, or writes it visibly to the counters."""
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
        """Record whether what was made from ``weight`` is finite."""
        if finite:
            self._bad.pop(key, None)
        else:
            self._bad[key] = StorageWeakRef(storage_of(weight))

    @property
    def is_all_finite(self) -> bool:
        """Say whether everything made from weights that still exist is finite."""
        return not self._bad or all(storage.expired() for storage in list(self._bad.values()))

    def drop(self) -> None:
        """Forget everything."""
        self._known.clear()
        self._bad.clear()


def all_finite_of(weights: FiniteWeights) -> AllFinite:
    """Return what graphs call: ``all_finite(values, kept, before=True)``: whether all these are finite, and ``before``.

    values: tensors of this call; kept: copies of parameters.
    """

    def all_finite(values: tuple[Tensor, ...], kept: tuple[Tensor, ...] = (), before: bool = True) -> bool:
        if not before or any(map(is_in_mode, values)):
            return False
        return all(map(is_finite, values)) and all(map(weights.is_kept_finite, kept))

    return all_finite


def max_pool_of(weights: FiniteWeights) -> Callable[..., Tensor]:
    """Return what graphs call: ``max_pool_of_finite(x, size, finite)``, ``F.max_pool2d(x, size, 2, size - 2)``.

    x: bf16 images of even height and width, the output of a relu; size: 2 or 3; finite: whether ``x`` is, if all
    weights are. The same bits: non-negative floats are ordered like the 16-bit integers with the same bits, and integer
    maxima are four times as fast. Rows are reduced first, then columns.
    """

    def max_pool_of_finite(x: Tensor, size: int, finite: bool) -> Tensor:
        if not finite or not weights.is_all_finite:
            return F.max_pool2d(x, size, 2, size - 2)
        return _maxima(_maxima(x.view(torch.int16), 2, size), 3, size).view(x.dtype)

    return max_pool_of_finite


def _maxima(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the maximum of each pair of neighbours in ``dim``; for ``size`` 3, also of the element before the pair."""
    pairs = x.unflatten(dim, (-1, 2))
    found = torch.maximum(pairs.select(dim + 1, 0), pairs.select(dim + 1, 1))
    if size == 3 and found.shape[dim] > 1:
        rest = found.narrow(dim, 1, found.shape[dim] - 1)
        torch.maximum(rest, pairs.select(dim + 1, 1).narrow(dim, 0, rest.shape[dim]), out=rest)
    return found

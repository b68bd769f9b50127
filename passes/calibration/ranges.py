"""The range of a value over batches: its largest and smallest magnitude, and how many elements have each exponent.

Before: a float32 tensor. After: ``range_of([tensor])``; ranges of other batches and processes are added with ``+``.

Elements of at most -1e30, and infinite ones and NaN, are counted as ``masked``: attention masks hold them. Of these the
largest finite magnitude alone is in another number, ``Peak.mask``: a cast clamps it to the range of its dtype
(``within_range``), but for lists that reproduce ``torch.autocast``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = ("float16", "bfloat16")
LIMITS = {name: float(torch.finfo(getattr(torch, name)).max) for name in DTYPES}
# Exponents (of two) of the smallest normal number, and of the smallest that does not become 0.
NORMAL = {"float16": -14, "bfloat16": -126}
NONZERO = {"float16": -25, "bfloat16": -134}
MASK = -1e30
BIAS, EXPONENTS = 127, 256  # of float32


@dataclass(frozen=True)
class Peak:
    """The largest magnitude in ``batches`` batches, and in how many of them it is above each dtype's limit.

    ``mask``: the largest finite magnitude of masked elements; 0 if there is none.
    """

    largest: float
    batches: int
    over: Mapping[str, int]
    mask: float = 0.0

    def __add__(self, other: Peak) -> Peak:
        """Return the peak over the batches of both."""
        return self._joined(other, operator.add)

    def beside(self, other: Peak) -> Peak:
        """Return the peak of two values of the same batch."""
        return self._joined(other, max)

    def _joined(self, other: Peak, of_counts: Callable[[int, int], int]) -> Peak:
        over = {name: of_counts(self.over[name], other.over[name]) for name in DTYPES}
        batches = of_counts(self.batches, other.batches)
        return Peak(max(self.largest, other.largest), batches, over, max(self.mask, other.mask))


@dataclass(frozen=True)
class Range:
    """The range of a value.

    ``peak``: the largest magnitude. ``least``: the smallest normal float32 magnitude; 0 if all are 0. ``elements``: how
    many, ``zeros`` (and float32 subnormals) included, ``masked`` not. ``exponents``: the number of elements whose
    magnitude is in [2**e, 2**(e+1)), by e.
    """

    peak: Peak
    least: float
    elements: int
    zeros: int
    masked: int
    exponents: Mapping[int, int]

    def __add__(self, other: Range) -> Range:
        """Return the range over the batches of both."""
        return self._joined(other, self.peak + other.peak)

    def beside(self, other: Range) -> Range:
        """Return the range of two values of the same batch."""
        return self._joined(other, self.peak.beside(other.peak))

    def _joined(self, other: Range, peak: Peak) -> Range:
        least = min(filter(None, (self.least, other.least)), default=0.0)
        keys = sorted({*self.exponents, *other.exponents})
        counts = {e: self.exponents.get(e, 0) + other.exponents.get(e, 0) for e in keys}
        elements, zeros = self.elements + other.elements, self.zeros + other.zeros
        return Range(peak, least, elements, zeros, self.masked + other.masked, counts)

    def fractions(self, dtype: str, scale: float = 1.0) -> dict[str, float]:
        """Return the shares of nonzero elements that, times ``scale``, a power of two, leave the range of ``dtype``.

        ``overflow``: become infinite; ``subnormal``: lose significant bits; ``underflow``: become 0. Counted by
        exponents: the elements of one exponent count alike.
        """
        nonzero = self.elements - self.zeros
        shift = round(math.log2(scale))
        found = {"overflow": 0, "subnormal": 0, "underflow": 0}
        for exponent, count in self.exponents.items():
            found[_fate(exponent + shift, dtype)] = found.get(_fate(exponent + shift, dtype), 0) + count
        return {name: found[name] / nonzero if nonzero else 0.0 for name in ("overflow", "subnormal", "underflow")}


def _fate(exponent: int, dtype: str) -> str:
    if exponent > math.frexp(LIMITS[dtype])[1] - 1:
        return "overflow"
    if exponent >= NORMAL[dtype]:
        return "normal"
    return "subnormal" if exponent >= NONZERO[dtype] else "underflow"


def range_of(values: Sequence[Tensor]) -> Range | None:
    """Return the range of float32 tensors of one batch; None if they have no elements or no plain memory."""
    found = [_range(t.detach()) for t in values if is_measurable(t) and t.numel()]
    whole = found[0] if found else None
    for one in found[1:]:
        whole = one if whole is None else whole.beside(one)
    return whole


def is_measurable(tensor: Tensor) -> bool:
    """Say whether a tensor is float32 and dense."""
    return tensor.dtype == torch.float32 and tensor.layout == torch.strided and not tensor.is_nested


def _range(tensor: Tensor) -> Range:
    flat = tensor.reshape(-1).contiguous()
    masked = ~torch.isfinite(flat) | (flat <= MASK)
    exponents = ((flat.view(torch.int32) >> 23) & (EXPONENTS - 1)).masked_fill_(masked, EXPONENTS - 1)
    counts = torch.bincount(exponents, minlength=EXPONENTS).tolist()
    sizes = flat.abs().masked_fill_(masked, 0.0)
    largest = float(sizes.max())
    least = float(sizes.masked_fill_(exponents == 0, math.inf).masked_fill_(masked, math.inf).min())
    hidden = counts[EXPONENTS - 1]
    seen = {e - BIAS: n for e, n in enumerate(counts[:-1]) if n and e}
    over = {name: int(largest > LIMITS[name]) for name in DTYPES}
    elements = flat.numel() - hidden
    lowest = float(flat.masked_fill(~torch.isfinite(flat), 0.0).min()) if hidden else 0.0
    mask = -lowest if lowest <= MASK else 0.0
    return Range(Peak(largest, 1, over, mask), 0.0 if math.isinf(least) else least, elements, counts[0], hidden, seen)

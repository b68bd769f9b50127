"""The range of a value over batches: its largest and smallest magnitude, and how many elements have each exponent.

Before: a float32 tensor. After: ``range_of([tensor])``; ranges of other batches and processes are added with ``+``.

Elements of at most -1e30, and infinite ones and NaN, are counted as ``masked``: attention masks hold them. Of these the
largest finite magnitude alone is in another number, ``Range.mask``: a cast clamps it to the range of its dtype
(``within_range``), but for lists that reproduce ``torch.autocast``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
class Range:
    """The range of a value over ``batches`` batches, or its peak alone: the first four fields.

    ``largest``: the largest magnitude. ``over``: in how many batches it is above each dtype's limit. ``mask``: the
    largest finite magnitude of masked elements; 0 if there is none. ``least``: the smallest normal float32 magnitude;
    0 if all are 0. ``elements``: how many, ``zeros`` (and float32 subnormals) included, ``masked`` not. ``exponents``:
    the number of elements whose magnitude is in [2**e, 2**(e+1)), by e.
    """

    largest: float
    batches: int
    over: Mapping[str, int]
    mask: float = 0.0
    least: float = 0.0
    elements: int = 0
    zeros: int = 0
    masked: int = 0
    exponents: Mapping[int, int] = field(default_factory=dict)

    @property
    def peak(self) -> Range:
        """The largest magnitudes alone."""
        return Range(self.largest, self.batches, self.over, self.mask)

    def __add__(self, other: Range) -> Range:
        """Return the range over the batches of both."""
        return self._joined(other, operator.add)

    def beside(self, other: Range) -> Range:
        """Return the range of two values of the same batch."""
        return self._joined(other, max)

    def _joined(self, other: Range, of_batches: Callable[[int, int], int]) -> Range:
        keys = sorted({*self.exponents, *other.exponents})
        return Range(
            max(self.largest, other.largest),
            of_batches(self.batches, other.batches),
            {name: of_batches(self.over[name], other.over[name]) for name in DTYPES},
            max(self.mask, other.mask),
            min(filter(None, (self.least, other.least)), default=0.0),
            self.elements + other.elements,
            self.zeros + other.zeros,
            self.masked + other.masked,
            {e: self.exponents.get(e, 0) + other.exponents.get(e, 0) for e in keys},
        )

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
    return functools.reduce(Range.beside, found) if found else None


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
    least = 0.0 if math.isinf(least) else least
    return Range(largest, 1, over, mask, least, elements, counts[0], hidden, seen)

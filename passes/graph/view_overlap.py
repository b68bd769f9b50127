"""Whether two views of one storage have an element in common.

Before: ``q, k, v = qkv.chunk(3, -1)``, three views whose memory interleaves. After: ``may_overlap(k, v)`` is false.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class _Place:
    """Which bytes of a storage a view reads: from ``start`` on, ``steps`` of (how many, how far apart)."""

    start: int
    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(view: torch.Tensor) -> _Place:
        width = view.element_size()
        steps = [(concrete_size(n), concrete_size(d) * width) for n, d in zip(view.shape, view.stride(), strict=True)]
        return _Place(concrete_size(view.storage_offset()) * width, ((width, 1), *(s for s in steps if s[0] != 1)))

    def length(self, below: int | None = None) -> int:
        """Return the number of bytes from the first to the last, by those steps that are less than ``below``."""
        return 1 + sum((count - 1) * step for count, step in self.steps if below is None or step < below)

    def fits(self, row: int) -> bool:
        """Say whether the view is a part of each of some rows of ``row`` bytes, the same part in all."""
        whole = all(step < row or step % row == 0 for _, step in self.steps)
        return whole and self.start % row + self.length(row) <= row


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two views of one storage may share an element; false only where it is sure that they do not."""
    if 0 in (*map(concrete_size, a.shape), *map(concrete_size, b.shape)):
        return False
    one, other = _Place.of(a), _Place.of(b)
    if _apart(one.start, one.length(), other.start, other.length()):
        return False
    rows = {step for place in (one, other) for _, step in place.steps if step > 1}
    return not any(
        one.fits(row)
        and other.fits(row)
        and _apart(one.start % row, one.length(row), other.start % row, other.length(row))
        for row in rows
    )


def _apart(a: int, a_length: int, b: int, b_length: int) -> bool:
    return a + a_length <= b or b + b_length <= a

"""Decide whether two views of one storage share an element.

Before: ``q, k, v = qkv.chunk(3, -1)``, three views whose memory interleaves. After: ``may_overlap(k, v)`` is False.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_graph.passes.torch_compat.fake import concrete_size


@dataclass(frozen=True)
class _Place:
    """The bytes of a storage that a view reads: ``start``, and ``steps`` of (count, distance in bytes)."""

    start: int
    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def of(view: torch.Tensor) -> _Place:
        width = view.element_size()
        steps = [(concrete_size(n), concrete_size(d) * width) for n, d in zip(view.shape, view.stride(), strict=True)]
        return _Place(concrete_size(view.storage_offset()) * width, ((width, 1), *(s for s in steps if s[0] != 1)))

    def length(self, below: int | None = None) -> int:
        """Return the number of bytes from the first to the last, over the steps shorter than ``below``."""
        return 1 + sum((count - 1) * step for count, step in self.steps if below is None or step < below)

    def fits(self, row: int) -> bool:
        """Say whether the view takes the same part of each of its rows of ``row`` bytes."""
        whole = all(step < row or step % row == 0 for _, step in self.steps)
        return whole and self.start % row + self.length(row) <= row


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two views of one storage may share an element; False only if they certainly do not."""
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

"""A bounded record of the loss scale and the skipped steps, which copies nothing to the host until it is read.

Before: ``print(scaler.get_scale())`` in each step, a copy to the host each. After: ``scale.records.rows()``, one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.operators import foreach_copy_

MOST = 1000  # steps that are kept


class ScaleRecords:
    """The scale of each of the last ``most`` steps, and how many had been skipped before it.

    Both are copied into a ring on the device of the scale, two numbers a step.
    """

    def __init__(self, most: int = MOST) -> None:
        """Start without rows."""
        self.most, self.count = most, 0
        self._ring: tuple[Tensor, Tensor] | None = None
        self._places: list[tuple[Tensor, Tensor]] = []  # of the ring

    def note(self, state: Sequence[Tensor]) -> None:
        """Note the scale of a step before it updates ``state``: scale, ..., number of skipped steps, ..."""
        scale, skipped = state[0], state[3]
        if self._ring is None or self._ring[0].device != scale.device:
            scales, counts = self._ring or (torch.zeros(self.most), torch.zeros(self.most, dtype=torch.int32))
            self._ring = scales.to(scale.device), counts.to(scale.device)
            self._places = list(zip(*(ring.unbind() for ring in self._ring), strict=True))
        foreach_copy_(self._places[self.count % self.most], (scale, skipped))
        self.count += 1

    def undo(self) -> None:
        """Drop the last row: its step has raised."""
        self.count -= 1

    def first(self) -> int:
        """Return the number of the oldest row, from 1."""
        return max(self.count - self.most, 0) + 1

    def rows(self, skipped_now: int) -> list[tuple[int, float, bool]]:
        """Return (number, scale, skipped) of each step, oldest first; ``skipped_now``: how many were skipped so far."""
        both = [] if self._ring is None else torch.stack([ring.double() for ring in self._ring], 1).tolist()
        read = [both[i % self.most] for i in range(self.first() - 1, self.count)]
        counts = [int(skipped) for _, skipped in read] + [skipped_now]
        bad = [after > before for before, after in pairwise(counts)]
        return [(self.first() + i, scale, bad[i]) for i, (scale, _) in enumerate(read)]

    def skipped_before(self, steps: int) -> Tensor | int:
        """Return how many steps had been skipped before the last ``steps`` of those that are kept; no copy is made."""
        place = max(self.count - min(steps, self.most), 0)
        return 0 if self._ring is None else self._ring[1][place % self.most]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a new one: the numbers of steps start again."""
        return ScaleRecords, (self.most,)

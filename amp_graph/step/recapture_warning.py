"""Warns about repeated captures of a step, which take seconds each and are never dropped.

Before: ``step(x, y, 1 / epoch)``, a new graph for every number. After: an AmpGraphWarning at the sixteenth that names
the number, and says that a tensor may change without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from amp_graph.errors import warn

WARNED_AT = 16  # captures: variants of a batch, train and eval take some


class Recaptures:
    """The values, or shapes of tensors, in the batch at each capture of a step."""

    def __init__(self) -> None:
        """Start with no captures."""
        self.given: dict[str, set[Any]] = {}
        self.count = 0

    def note(self, batch: Sequence[Any]) -> None:
        """Record the batch of another capture; warn once if there were many."""
        for path, value in tree_flatten_with_path(tuple(batch))[0]:
            seen = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)[:200]
            self.given.setdefault(f"batch{keystr(path)}", set()).add(seen)
        self.count += 1
        if self.count == WARNED_AT:
            warn(self._told())

    def _told(self) -> str:
        place, seen = max(self.given.items(), key=lambda item: len(item[1]), default=("batch", set()))
        text = f"TrainStep: captured {self.count} times; each takes as long as the first, and all graphs are kept"
        if len(seen) < WARNED_AT // 2:
            return f"{text}\n  fix:   look for what changes from step to step: TORCH_LOGS=recompiles"
        if all(isinstance(one, tuple) for one in seen):
            return f"{text}: {place} came in {len(seen)} shapes\n  fix:   pad it to a few sizes"
        return (
            f"{text}: {place} had {len(seen)} values\n  fix:   torch.tensor(value), which may change without a capture"
        )

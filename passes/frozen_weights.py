"""Copies of frozen weights that outlive the updates of what trains beside them, as adapters do.

Before: a cast of every weight behind any optimizer's step, for nobody knows what a loop does to weights there.
After: ``FrozenWeights.stays(kept, weight)``: none of those that were found as they were behind the first few steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from amp_graph.passes.kept_copy import KeptCopy, is_of
from amp_graph.passes.weight_updates import UPDATES, outlives

PROOF = 3  # updates behind which a weight was cast to the same bits, until it is taken to stay as it is


class FrozenWeights:
    """Which of a model's copies need no cast behind an update; ``kept`` are all of them.

    Of weights that need no gradient and that no optimizer has stepped over, in a model that trains otherwise: what only
    infers may be an average of another's weights. A write behind an update that no counter shows, seen in those first
    casts or in the words that are looked at, ends it for all of them.
    """

    def __init__(self, kept: Mapping[int, KeptCopy]) -> None:
        self._kept = kept
        self._written = False
        self._trains, self._asked_at = False, UPDATES.mark

    def may_stay(self, weight: Tensor, mark: object) -> bool:
        """Say whether ``weight`` may be as it was at ``mark``, as far as anybody knows who updates what."""
        if weight.requires_grad or self._written:
            return False
        now = UPDATES.mark
        return outlives(weight, mark, now) and self._some_train(now)

    def stays(self, kept: KeptCopy, weight: Tensor) -> bool:
        """Say whether ``kept`` is of ``weight`` as it is now, though others were updated since, whose mark it takes."""
        now = UPDATES.mark  # before the values: an update in between makes the copy old
        if kept.proven < PROOF or not self.may_stay(weight, kept.mark):
            return False
        if not is_of(kept, weight) or weight._version != kept.version:
            return False
        if kept.words.tobytes() != kept.values:
            self._written = True
            return False
        kept.mark = now
        return True

    def compare(self, old: KeptCopy, new: KeptCopy) -> None:
        """Take note that a weight which may have stayed was cast anew."""
        if torch.equal(old.low.view(torch.int16), new.low.view(torch.int16)) and new.values == old.values:
            new.proven = old.proven + 1
        else:
            self._written = True

    def _some_train(self, now: object) -> bool:
        """Say whether an optimizer has stepped over any weight of the model; looked for once an update."""
        if not self._trains and self._asked_at is not now:
            self._trains = any(kept.key in UPDATES.trained for kept in list(self._kept.values()))
            self._asked_at = now
        return self._trains

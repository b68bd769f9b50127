"""Weights whose memory somebody else holds, and may write at any time with nothing to show it.

Before: ``weight.detach().numpy()`` is alive. After: ``HeldWeights.trusted_signs(weight)`` has no mark, so that no copy
of the weight is ever current; if that lasts, the reason is told.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor

from amp_graph.passes.torch_compat.dynamo_capture import a_capture_runs
from amp_graph.passes.weights.cache_entry import Signs, signs_of
from amp_graph.passes.weights.watched_memory import ADDRESS, watch_of

FOR_GOOD = 8  # calls in a row, while no thread captures: a capture holds each weight's memory for a moment


class HeldWeights:
    """The weights of one model that were found to be held, each with the reason and for how many calls in a row.

    ``tell`` is called with a weight that stays held, and why.
    """

    def __init__(self, tell: Callable[[Tensor, str], None]) -> None:
        self.calls: dict[int, tuple[str, int]] = {}  # by id of the weight
        self._tell = tell
        self._has_collected = False  # whether garbage was collected to find out who holds a weight

    def trusted_signs(self, weight: Tensor) -> Signs:
        """Return the signs that show any write to ``weight`` from now on.

        Where some write would not show, the signs have no mark, so that no copy is current.
        """
        watch = watch_of(weight)
        signs = signs_of(weight, watch)
        why = watch.why_not_free(weight)
        if not why:
            self.calls.pop(id(weight), None)
            return signs
        before, calls = self.calls.get(id(weight), ("", 0))
        calls = calls + (not a_capture_runs()) if before == why else 1
        if calls == FOR_GOOD and not self._has_collected:  # a capture leaves aliases behind, in reference cycles
            self._has_collected = True
            self.calls[id(weight)] = why, calls - 1
            gc.collect()
            return self.trusted_signs(weight)
        self.calls[id(weight)] = why, calls
        if calls == (1 if why == ADDRESS else FOR_GOOD):
            self._tell(weight, why)
        return signs._replace(mark=None)

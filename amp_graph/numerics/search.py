"""Finds a small set of candidates that is sufficient, in few trials: one of n in log2(n) + 2.

Before: 64 operations, of which one spoils the result. After: ``smallest(candidates, meets)``, that one. Sources: delta
debugging (Zeller and Hildebrandt, 2002), and group testing by halves (Hwang, 1972).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """A sufficient set, in the order in which it was found; ``is_minimal``: whether the trials were enough."""

    chosen: tuple[str, ...]
    is_minimal: bool


def smallest(candidates: Sequence[str], meets: Callable[[tuple[str, ...]], bool], most: int) -> Found | None:
    """Return a set for which ``meets`` is true, and none of whose members can be left out if more never hurts.

    Each round finds the last candidate without which the ones before it are not sufficient, by halves. The last trial
    is of the set that is returned. ``most``: trials after which the rest of a sufficient set is returned as it is.
    None: all candidates together are not sufficient.
    """
    chosen: list[str] = []
    trials, end, known = 0, len(candidates), False  # whether ``chosen`` and the first ``end`` are known to be sufficient

    def tried(count: int) -> bool:
        nonlocal trials
        trials += 1
        return meets((*chosen, *candidates[:count]))

    while True:
        if tried(0):
            return Found(tuple(chosen), True)
        low, high = 0, end
        while high - low > 1:
            if trials >= most and known:
                return Found((*chosen, *candidates[:high]), False)
            middle = (low + high) // 2
            if tried(middle):
                high, known = middle, True
            else:
                low = middle
        if high == end and not known and (end == 0 or not tried(end)):
            return None
        known = True
        chosen.append(candidates[high - 1])
        end = high - 1
        if not end:
            return Found(tuple(chosen), True)

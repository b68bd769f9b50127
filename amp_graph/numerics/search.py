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
    is of the set that is returned. All candidates together are taken to be sufficient until a round shows otherwise.
    ``most``: trials after which a set that is known to be sufficient is returned as it is. None: all candidates
    together are not sufficient.
    """
    found = _Search(candidates, meets, most)
    while not found.is_sufficient(0):
        if found.ends_without_result():
            return None
        if (cut := found.last_needed()) is not None:
            return Found(cut, False)
        if not found.end and found.is_known:
            break
    return Found(tuple(found.chosen), True)


class _Search:
    """The candidates chosen so far; they and the first ``end`` others are sufficient. ``is_known``: that was tried."""

    def __init__(self, candidates: Sequence[str], meets: Callable[[tuple[str, ...]], bool], most: int) -> None:
        self.candidates, self.meets, self.most = candidates, meets, most
        self.chosen: list[str] = []
        self.end, self.trials, self.is_known = len(candidates), 0, False

    def is_sufficient(self, count: int) -> bool:
        """Try the chosen candidates and the first ``count``."""
        self.trials += 1
        return self.meets((*self.chosen, *self.candidates[:count]))

    def ends_without_result(self) -> bool:
        """Say whether all candidates together are not sufficient; tries them only after a round was in vain."""
        if self.is_known or (not self.chosen and self.candidates):
            return False
        self.is_known = bool(self.end) and self.is_sufficient(self.end)
        return not self.is_known

    def last_needed(self) -> tuple[str, ...] | None:
        """Choose the last candidate that is needed; return a sufficient set instead where the trials are used up."""
        low, high = 0, self.end
        while high - low > 1:
            if self.trials >= self.most and self.is_known:
                return (*self.chosen, *self.candidates[:high])
            middle = (low + high) // 2
            if self.is_sufficient(middle):
                high, self.is_known = middle, True
            else:
                low = middle
        self.chosen.append(self.candidates[high - 1])
        self.end = high - 1
        return None

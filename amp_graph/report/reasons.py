"""Takes a reason apart: its words, which many operations share, and its figures, which differ from one to the next.

Before: ``aten.gelu: it rounds once; 3.2 us cheaper than ...``. After: ``("it rounds once", "3.2 us cheaper than ...")``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# The end of a reason that compares one operation's two precisions: it has other figures for each.
FIGURES = re.compile(r"; (?:takes the precision of its neighbours|as cheap as|[\d.]+ \w+ (?:cheaper|more expensive)).*")
BY_PRICE = "at the least predicted time"


def split_reason(reason: str, ops: Sequence[str]) -> tuple[str, str]:
    """Return a reason's words, without the names of the operations ``ops``, and its figures, or ""."""
    words = reason.removeprefix(", ".join(ops) + ": ")
    found = FIGURES.search(words)
    if found is None:
        return words, ""
    return f"{words[: found.start()]}; {BY_PRICE}", found[0].removeprefix("; ")

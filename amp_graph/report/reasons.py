"""Takes a reason apart: its words, which many operations share, and its figures, which differ from one to the next.

Before: ``aten.gelu: it rounds once; 3.2 us cheaper than so``. After: ``("it rounds once", "3.2 us cheaper than so")``.
A cast's reason names the node that reads it: ``linear_3 (aten.linear) takes low precision`` has the same two parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# The end of a reason that compares one operation's two precisions: it has other figures for each.
FIGURES = re.compile(r"; (?:takes the precision of its neighbours|as cheap as|[\d.]+ \w+ (?:cheaper|more expensive)).*")
READER = re.compile(r"(\S+) \((.+)\) (takes \w+ precision)")
BY_PRICE = "at the least predicted time"


def split_reason(reason: str, ops: Sequence[str]) -> tuple[str, str]:
    """Return a reason's words, without the names of the operations ``ops``, and its figures, or ""."""
    read = READER.fullmatch(reason)
    if read is not None:
        return f"{read[2]} {read[3]}", f"for {read[1]}"
    words = reason.removeprefix(", ".join(ops) + ": ")
    found = FIGURES.search(words)
    if found is None:
        return words, ""
    return f"{words[: found.start()]}; {BY_PRICE}", found[0].removeprefix("; ")

r"""Match module paths against regular expressions in bounded time.

Python's ``re`` tries one way after another: ``(a|aa)+b`` takes a day over 60 times "a". The library ``regex`` reads the
same patterns and stops after a time.
Before: ``re.fullmatch(pattern, path)``. After: ``matches(pattern, path)``, the same answer, or a PatternError.
"""

from __future__ import annotations

import math
import re
import warnings
from functools import lru_cache

import regex

from amp_graph.lists.errors import ListError

LONGEST = 2000  # characters of a pattern
REPEATED = 100_000  # the product of all {n}: regex compiles nested ones n times
SECONDS = 1.0  # of one match
LEGAL = f"a Python regular expression for the whole module path, of up to {LONGEST} characters"


class PatternError(ListError):
    """What is no regular expression, or one that takes too long."""

    def __init__(self, what: str) -> None:
        super().__init__(f"regular expression: {what}", legal=LEGAL, fix='"lm_head|.*norm"')
        self.what = what


@lru_cache(maxsize=256)
def check_pattern(pattern: str) -> regex.Pattern[str]:
    """Return ``pattern`` compiled. Raises PatternError."""
    if not isinstance(pattern, str):
        raise PatternError(f"it is a {type(pattern).__name__}")
    if len(pattern) > LONGEST:
        raise PatternError(f"it has {len(pattern)} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what later versions of Python may read otherwise
            re.compile(pattern)  # regex has more syntax
            counts = [max(int(n or 1) for n in found) for found in re.findall(r"\{(\d*),?(\d*)\}", pattern)]
            if math.prod(counts) > REPEATED:
                raise PatternError(f"its {{n}} repeat a part {math.prod(counts)} times, more than {REPEATED}")
            return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
        raise PatternError(str(error)) from error


@lru_cache(maxsize=1 << 16)
def matches(pattern: str, path: str) -> bool:
    """Say whether ``pattern`` matches the whole of ``path``. Raises PatternError."""
    try:
        return check_pattern(pattern).fullmatch(path, timeout=SECONDS) is not None
    except TimeoutError:
        raise PatternError(f"it takes more than {SECONDS:g} s to match {path[:200]!r}") from None

"""Finds line numbers in a TOML file: tomllib has none, so the text is scanned for table headers."""

from __future__ import annotations

import bisect
import re


class Lines:
    """The line of each table of a file, and of strings in it."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines = text.splitlines()
        self._starts: dict[str, list[int]] = {}
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[\[?\s*(\w+)\s*\]\]?", line):
                self._starts.setdefault(header[1], []).append(number)
        self._headers = sorted(n for numbers in self._starts.values() for n in numbers)
        self._ends = [*self._headers, len(self._lines) + 1]

    def at(self, table: str, index: int = 0, quoted: str = "") -> str:
        """Return ``file:line`` of a table, or of the line in it that holds `quoted`."""
        starts = self._starts.get(table, ())
        if index >= len(starts):
            return self._file
        start = starts[index]
        if quoted:
            end = self._ends[bisect.bisect_right(self._headers, start)]
            for number in range(start, end):
                if quoted in self._lines[number - 1]:
                    return f"{self._file}:{number}"
        return f"{self._file}:{start}"

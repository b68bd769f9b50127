"""Reads a TOML file that a user wrote, or anybody, and the fields of its tables; errors say what is wrong and where.

Before: bytes on a disk. After: ``read_toml(read_text(path), "mine.toml", fix)``, its tables. tomllib has no line
numbers, so ``Lines`` scans the text for table headers.
"""

from __future__ import annotations

import bisect
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from amp_graph.lists.errors import ListError, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 1 << 20  # bytes; the largest of ours has 100,000
PARTS = 200  # of a key, a.b.c: tomllib takes a time that grows with their square
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
LEGAL = "TOML 1.0"


def read_text(path: Path, fix: str) -> str:
    """Return the text of a file. Raises ListError for one that cannot be read, or is no text."""
    try:
        with open(path, "rb") as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ListError(f"more than {LARGEST} bytes", where=str(path), legal=LEGAL, fix=fix)
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ListError(f"not UTF-8: {error.reason}", where=f"{path}:{line}", legal=LEGAL, fix=fix) from error
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise ListError(what, where=str(path), legal="a file that may be read", fix=fix) from error


def read_toml(text: str, file: str, fix: str) -> dict[str, object]:
    """Return the tables of a TOML text. Raises ListError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > PARTS and _QUOTED.sub("", line).count(".") > PARTS:
            raise ListError(f"a key of more than {PARTS} parts", where=f"{file}:{number}", legal=LEGAL, fix=fix)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = re.search(r"at line (\d+)", str(error))
        where = f"{file}:{told[1]}" if told else file
        raise ListError(f"not TOML: {str(error)[:500]}", where=where, legal=LEGAL, fix=fix) from error
    except RecursionError as error:
        raise ListError("nested too deeply", where=file, legal=LEGAL, fix=fix) from error
    except (ValueError, OverflowError) as error:  # a number of thousands of digits, a date without a day
        raise ListError(f"not TOML: {str(error)[:500]}", where=file, legal=LEGAL, fix=fix) from error


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


LONGEST_NAME = 200  # characters; longer names get no suggestion


Takes = tuple[Callable[[object], object], str]  # whether a value is legal, and which are
TEXT: Takes = (lambda value: isinstance(value, str), "a string")
FLAG: Takes = (lambda value: isinstance(value, bool), "true, false")
TABLE: Takes = (lambda value: isinstance(value, dict), "a table")


def one_of(*legal: str) -> Takes:
    """Return what a key with enumerated values takes."""
    return legal.__contains__, ", ".join(legal)


def check_table(
    entry: object, takes: Mapping[str, Takes], inside: str, where: Callable[[str], str], fix: str, *needed: str
) -> dict[str, object]:
    """Return ``entry`` if it is a table of legal keys with legal values, that has the ``needed`` ones."""
    if not isinstance(entry, dict):
        raise ListError(f"{inside} is {shortened(entry)}", where=where(""), legal="a table", fix=fix)
    for key, value in entry.items():
        if key not in takes:
            what = f"unknown key {shortened(key)} in {inside}{did_you_mean(key, takes)}"
            raise ListError(what, where=where(key), legal=", ".join(takes), fix=fix)
        is_legal, legal = takes[key]
        if not is_legal(value):
            near = did_you_mean(value, legal.split(", ")) if isinstance(value, str) else ""
            raise ListError(f"{key} = {shortened(value)}{near}", where=where(key), legal=legal, fix=fix)
    for key in needed:
        if key not in entry:
            raise ListError(f"{inside} without `{key}`", where=where(""), legal=takes[key][1], fix=fix)
    return entry


def tables(value: object, name: str, where: str, fix: str) -> list[object]:
    """Return `value` if it is an array of tables."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ListError(f"{name!r} is not an array of tables", where=where, legal=f"[[{name}]]", fix=fix)
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean a, b?``, or "" if no known name is similar."""
    near = nearest(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that resemble `name`, the nearest first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.7) if len(name) <= LONGEST_NAME else []

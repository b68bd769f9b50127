"""Read a TOML file that a user wrote, or anybody: whatever is in it, a ListError says what is wrong and where.

Before: bytes on a disk. After: ``read_toml(read_text(path), "mine.toml", fix)``, its tables.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from amp_graph.lists.errors import ListError

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

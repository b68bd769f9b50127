"""Prints the command line's output: tables, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from amp_graph.numerics.overflow.result import plain_values
from amp_graph.passes.graph.graph_text import aligned


def write_json(data: object) -> None:
    """Print ``data`` (dicts, lists, numbers, text) as JSON; infinite numbers and NaN become text."""
    sys.stdout.write(json_text(data))


def json_text(data: object) -> str:
    """Return ``data`` as JSON, with a line break at its end."""
    return json.dumps(plain_values(data), indent=2) + "\n"


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    for line in aligned([columns, *rows]):
        print(line)

"""Prints the command line's output: tables, and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence

from amp_graph.passes.graph.graph_text import aligned


def write_json(data: object) -> None:
    """Print ``data`` (dicts, lists, numbers, text) as JSON; infinite numbers and NaN become text."""
    sys.stdout.write(json_text(data))


def json_text(data: object) -> str:
    """Return ``data`` as JSON, with a line break at its end."""
    return json.dumps(_finite(data), indent=2) + "\n"


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {str(key): _finite(one) for key, one in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(one) for one in data]
    return data if not isinstance(data, float) or math.isfinite(data) else str(data)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    for line in aligned([columns, *rows]):
        print(line)

"""Prints the command line's output: colors and tables on a terminal, plain text elsewhere.

``write_lines([("%0: f32[2] = input x", "")], sys.stdout)``; rich itself heeds NO_COLOR and TERM=dumb.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TextIO

from amp_graph.passes.graph.graph_text import aligned


def write_lines(lines: Iterable[tuple[str, str]], out: TextIO) -> None:
    """Print (text, style) lines."""
    if not out.isatty():
        out.writelines(text + "\n" for text, _ in lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False, soft_wrap=True)
    for text, style in lines:
        console.print(Text(text, style=style))


def write_json(data: object, out: TextIO) -> None:
    """Print ``data`` (dicts, lists, numbers, text) as JSON; infinite numbers and NaN become text."""
    out.write(json.dumps(_finite(data), indent=2) + "\n")


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {str(key): _finite(one) for key, one in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(one) for one in data]
    return data if not isinstance(data, float) or math.isfinite(data) else str(data)


def write_table(columns: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], out: TextIO) -> None:
    """Print a table of (cells, style) rows; it is wrapped only on a terminal."""
    if not out.isatty():
        out.writelines(line + "\n" for line in aligned([columns, *(cells for cells, _ in rows)]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for cells, style in rows:
        table.add_row(*(Text(cell, style=style) for cell in cells))
    Console(file=out, highlight=False).print(table)

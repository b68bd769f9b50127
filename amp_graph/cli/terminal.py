"""What a command hands to the command line, which prints it: a value for ``--json``, and lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from amp_graph.numerics.overflow.result import plain_values


class Told(NamedTuple):
    """What a command tells: dicts, lists, numbers and text for ``--json``; the same as lines; its exit status."""

    data: Any
    lines: Iterable[str]
    status: int = 0

    def text(self, *, as_json: bool) -> str:
        """Return what is printed."""
        return json_text(self.data) if as_json else "".join(f"{line}\n" for line in self.lines)


def json_text(data: object) -> str:
    """Return ``data`` as JSON, with a line break at its end; infinite numbers and NaN become text."""
    return json.dumps(plain_values(data), indent=2) + "\n"

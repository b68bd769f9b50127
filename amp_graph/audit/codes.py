"""The table of findings: ``CODES["AMP101"]`` has its level, what it is, why it matters, an example and the fix.

``codes.toml`` is the table; the docs have a page of it, and ``amp-graph audit`` prints its titles. ``name``: as linters
have it, "AMP101". ``level``: that of its findings unless one says otherwise. ``title``: the fault in a few words.
``why``: what it does to a training. ``bad``, ``good``: code with the fault and without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amp_graph.audit.records import Finding, Place
from amp_graph.lists.read_toml import read_toml

FILE = Path(__file__).with_name("codes.toml")


_TABLES: dict[str, Any] = dict(read_toml(FILE.read_text("utf-8"), str(FILE), ""))
CODES = {name: SimpleNamespace(name=name, **fields) for name, fields in _TABLES.items()}


def finding(
    code: str, place: Place, text: str, fix: str, *, level: str = "", also: Sequence[str] = (), **evidence: Any
) -> Finding:
    """Return a finding, at the level of its code unless another is given."""
    return Finding(code, level or CODES[code].level, place, text, fix, evidence, also)

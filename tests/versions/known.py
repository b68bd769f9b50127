"""The checked-in table of tests that fail with other versions of torch: expected failures there, strictly.

A failure that no row of ``known.toml`` names fails the run, and so does a test that a row names and that passes: the
table can neither hide a failure nor outlive its cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).parent / "known.toml"


def differences(torch: str | None = None, table: Path = TABLE) -> dict[str, str]:
    """Return the causes, by test, of a version of torch such as "2.11.0", or of all."""
    rows = tomllib.loads(table.read_text()).get("difference", [])
    if wrong := [row for row in rows if not row["tests"] or not row["cause"].strip()]:
        raise ValueError(f"{table.name}: a difference needs tests and a cause: {wrong[0]}")
    known = [row for row in rows if torch is None or ".".join(torch.split(".")[:2]) in row["torch"]]
    return {test: row["cause"] for row in known for test in row["tests"]}


def expect(items: Iterable[pytest.Item], torch: str) -> None:
    """Mark the tests of the rows of ``torch``."""
    known = differences(torch)
    for item in items:
        file, *_, name = item.nodeid.split("::")
        if cause := known.get(f"{file}::{name}"):
            item.add_marker(pytest.mark.xfail(strict=True, reason=cause))

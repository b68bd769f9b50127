"""The checked-in table of tests that fail with other versions of torch, compared with what failed.

Before: the ids of the tests that failed. After: those that no row of ``known.toml`` names, and the rows that no failure
bears out: both are errors, so that the table can neither hide a failure nor outlive its cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).parent / "known.toml"


@dataclass(frozen=True)
class Difference:
    """Tests that fail with one version of torch, and why."""

    tests: tuple[str, ...]
    torch: str  # major and minor
    cause: str

    def __post_init__(self) -> None:
        """Refuse a row that names no test or no cause."""
        if not self.tests or not self.cause.strip():
            raise ValueError(f"{TABLE.name}: a difference needs tests and a cause: {self}")


@dataclass(frozen=True)
class Compared:
    """What failed in one environment, against the table."""

    known: tuple[str, ...]
    unknown: tuple[str, ...]
    stale: tuple[str, ...]  # tests of rows that passed

    @property
    def is_clean(self) -> bool:
        """Say whether the table tells exactly what failed."""
        return not self.unknown and not self.stale


def differences(table: Path = TABLE) -> list[Difference]:
    """Read the table."""
    rows = tomllib.loads(table.read_text()).get("difference", [])
    return [Difference(tuple(row["tests"]), torch, row["cause"]) for row in rows for torch in row["torch"]]


def compared(failed: Iterable[str], torch: str, rows: Iterable[Difference]) -> Compared:
    """Compare the ids of failed tests with the rows of ``torch``, such as "2.11.0"."""
    named = [test for row in rows if row.torch == ".".join(torch.split(".")[:2]) for test in row.tests]
    known, unknown = [], []
    for test in failed:
        (known if _is_named(test, named) else unknown).append(test)
    stale = [name for name in named if not any(_is_named(test, [name]) for test in known)]
    return Compared(tuple(known), tuple(unknown), tuple(stale))


def _is_named(test: str, names: Iterable[str]) -> bool:
    return test in names or test.partition("[")[0] in names


@dataclass(frozen=True)
class Outcome:
    """What pytest wrote of one run."""

    passed: int
    failed: tuple[str, ...]
    skipped: dict[str, int]  # how many tests, by reason


def outcome(junit: Path) -> Outcome:
    """Read the file that ``pytest --junitxml`` wrote, with ``junit_family=xunit1``: ids need its attribute "file"."""
    passed, failed, skipped = 0, [], dict[str, int]()
    for case in ElementTree.parse(junit).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('file')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message", "")
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    return Outcome(passed, tuple(failed), skipped)

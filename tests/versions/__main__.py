"""Runs the tests in the environments of ``corners.toml`` and compares what failed with ``known.toml``.

    python -m tests.versions [--only 3.10:2.11.0,3.12:2.12.1] [--folder .versions] [-- PYTEST_ARGS]

An environment is kept in the folder and used again. Exit status 1 if a test failed that the table does not name, or if
one that it names passed; a Python that this machine lacks is named and left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.versions.environments import ROOT, Corner, corners, environment
from tests.versions.known import Compared, Outcome, compared, differences, outcome

SELECTED = "not slow and not integration and not browser"  # as `make test`


def main(argv: list[str]) -> int:
    """Run each corner; print a line for each and, below it, what the table does not tell."""
    options = _parsed(argv)
    clean, left_out = True, []
    for corner in options.only or corners():
        interpreter = corner.interpreter()
        if interpreter is None:
            left_out.append(corner.name)
            continue
        found = _tested(environment(corner, interpreter, options.folder), corner, options)
        told = compared(found.failed, corner.torch, differences())
        if options.pytest:  # tests that were not run have not passed
            told = replace(told, stale=())
        print("\n".join(_lines(corner, found, told)), flush=True)
        clean = clean and told.is_clean
    if left_out:
        print(f"not run, as this machine lacks their Python: {', '.join(left_out)}")
    return 0 if clean else 1


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_corners, default=[], help="corners, PYTHON:TORCH each, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where environments are kept")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest instead of the whole suite")
    return parser.parse_args(argv)


def _corners(text: str) -> list[Corner]:
    parts = [item.split(":") for item in text.split(",")]
    if any(len(part) != 2 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give PYTHON:TORCH, such as 3.10:2.11.0")
    return [Corner(python, torch) for python, torch in parts]


def _tested(python: Path, corner: Corner, options: argparse.Namespace) -> Outcome:
    written = options.folder / f"{corner.name}.xml"
    chosen = options.pytest or ["-n", "2", "-m", SELECTED]
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={written}", "-o", "junit_family=xunit1", *chosen]
    written.unlink(missing_ok=True)
    with (options.folder / f"{corner.name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if not written.exists():
        sys.exit(f"{corner.name}: pytest wrote no results; see {options.folder / corner.name}.log")
    return outcome(written)


def _lines(corner: Corner, found: Outcome, told: Compared) -> list[str]:
    lines = [
        f"{corner.name}: {found.passed} passed, {len(found.failed)} failed ({len(told.known)} known), "
        f"{sum(found.skipped.values())} skipped"
    ]
    lines += [f"  failed, not in the table: {test}" for test in told.unknown]
    lines += [f"  in the table, but passed: {test}" for test in told.stale]
    most = sorted(found.skipped.items(), key=lambda item: -item[1])
    return lines + [f"  skipped {count}: {reason}" for reason, count in most]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

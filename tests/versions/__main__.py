"""Runs the tests in the environments of ``corners.toml``; what is known to fail there is in ``known.toml``.

    python -m tests.versions [--only 3.10:2.11.0,3.12:2.12.1] [--folder .versions] [-- PYTEST_ARGS]

An environment is kept in the folder and used again. Exit status 1 if the tests of one failed; a Python that this
machine lacks is named and left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.versions.environments import ROOT, Corner, corners, environment

SELECTED = "not slow and not integration and not browser"  # as `make test`


def main(argv: list[str]) -> int:
    """Run each corner; print the last line of each, and the tests that failed."""
    options = _parsed(argv)
    clean, left_out = True, []
    for corner in options.only or corners():
        interpreter = corner.interpreter()
        if interpreter is None:
            left_out.append(corner.name)
            continue
        python = environment(corner, interpreter, options.folder)
        chosen = options.pytest or ["-n", "2", "-m", SELECTED]
        command = [str(python), "-m", "pytest", "-q", "-rfE", *chosen]
        ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        (options.folder / f"{corner.name}.log").write_text(ran.stdout + ran.stderr)
        failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        last = (ran.stdout.splitlines() or ["no output"])[-1]
        print("\n  ".join([f"{corner.name}: {last}", *failed]), flush=True)
        clean = clean and ran.returncode == 0
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

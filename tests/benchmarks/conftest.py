"""The scripts of ``benchmarks/`` are imported by their names, and forgotten at the end of each file of tests."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True, scope="module")
def _benchmarks():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(BENCHMARKS)):
            sys.modules.pop(name)

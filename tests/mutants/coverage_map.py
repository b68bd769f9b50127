"""Which test runs which line: coverage.py's data with the id of each test as context, one file per test file.

A file of data is used as long as the test file's text is the one that was run. Lines of a source that was edited since
are not trusted: of such a source, all tests that ran any of it count.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from coverage import Coverage, CoverageData

from tests.mutants.child import forked, pytest_main
from tests.mutants.population import FOLDERS, ROOT, core

TESTS = ROOT / "tests"
# Neither of the core, or so slow that a mutant cannot wait for them.
LEFT_OUT = ("passes/backends", "browser", "integrations", "conformance", "benchmarks", "versions", "cuda", "mutants",
            "test_docs", "test_fuzz", "test_guard", "test_examples", "test_example_scripts", "test_rooms", "test_names",
            "test_source_distribution", "test_checkout", "test_demo", "test_random_programs")  # fmt: skip
FILE_LIMIT = 600.0
FILE_SECONDS = 25.0  # of processor time: the tests of a file that come later are not recorded, and kill nothing


def digest(path: Path) -> str:
    """Return a short hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_files() -> list[str]:
    """Return the test files that mutants may be killed by."""
    found = [str(p.relative_to(ROOT)) for p in sorted(TESTS.rglob("test_*.py"))]
    return [f for f in found if not f.removeprefix("tests/").startswith(LEFT_OUT)]


@dataclass
class Recorder:
    """A plugin of pytest: names the test whose lines are run, and its time."""

    coverage: Coverage
    times: dict[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.process_time)

    def pytest_runtest_logstart(self, nodeid):
        self.coverage.switch_context(nodeid)

    def pytest_sessionstart(self, session):
        self.session = session

    def pytest_runtest_logfinish(self, nodeid):
        self.coverage.switch_context("")
        if time.process_time() - self.started > FILE_SECONDS:
            self.session.shouldstop = "enough of this file is recorded"

    def pytest_runtest_logreport(self, report):
        self.times[report.nodeid] = self.times.get(report.nodeid, 0.0) + report.duration
        if not report.passed:  # a test that is skipped kills nothing either
            self.failed.add(report.nodeid)


class Map:
    """The recorded files under ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "map").mkdir(parents=True, exist_ok=True)
        self.cache = folder / "cache"  # compiled kernels

    def _path(self, test_file: str, kind: str) -> Path:
        return self.folder / "map" / f"{test_file.removesuffix('.py').replace('/', '.')}.{kind}"

    def is_recorded(self, test_file: str) -> bool:
        """Say whether the test file was run with its present text."""
        notes = self._path(test_file, "json")
        return notes.exists() and json.loads(notes.read_text())["digest"] == digest(ROOT / test_file)

    def record(self, test_file: str) -> int:
        """Run a test file and write what its tests ran; return how many did."""
        data, notes = self._path(test_file, "coverage"), self._path(test_file, "json")
        data.unlink(missing_ok=True)

        def body():
            os.environ["AMP_GRAPH_CACHE"] = str(self.cache)
            coverage = Coverage(data_file=str(data), include=[str(ROOT / f / "*") for f in FOLDERS], config_file=False)
            coverage.start()
            recorder = Recorder(coverage)
            status = pytest_main([test_file], [recorder])
            coverage.stop()
            coverage.save()
            times = {test: t for test, t in recorder.times.items() if test not in recorder.failed}
            sources = {f: digest(ROOT / f) for f in core()}
            known = {"digest": digest(ROOT / test_file), "times": times, "failed": sorted(recorder.failed)}
            notes.write_text(json.dumps({**known, "sources": sources}))
            return status

        status = forked(body, self._path(test_file, "log"), FILE_LIMIT)
        for read in (Map.notes, Map.times, Map.lines):
            read.cache_clear()
        if not self.is_recorded(test_file):  # too slow, or died: its tests are not chosen
            notes.write_text(json.dumps({"digest": digest(ROOT / test_file), "times": {}, "failed": [], "sources": {}}))
        return status

    @cache  # noqa: B019
    def notes(self, test_file: str) -> dict:
        """Return what is written of a test file beside its lines."""
        return json.loads(self._path(test_file, "json").read_text())

    @cache  # noqa: B019
    def times(self) -> dict[str, float]:
        """Return the seconds of every recorded test that passed."""
        recorded = [f for f in test_files() if self.is_recorded(f)]
        return {test: seconds for file in recorded for test, seconds in self.notes(file)["times"].items()}

    @cache  # noqa: B019
    def lines(self, source: str) -> dict[int, set[str]]:
        """Return the tests that ran each line of a source; those of any line under 0."""
        found: dict[int, set[str]] = {0: set()}
        for file in test_files():
            data = self._path(file, "coverage")
            if not data.exists() or not self.is_recorded(file):
                continue
            read = CoverageData(str(data))
            read.read()
            same = self.notes(file)["sources"].get(source) == digest(ROOT / source)
            for line, contexts in read.contexts_by_lineno(str(ROOT / source)).items():
                tests = {c for c in contexts if c in self.notes(file)["times"]}
                found[0] |= tests
                if same:
                    found.setdefault(line, set()).update(tests)
                else:
                    found.setdefault(-1, set()).update(tests)
            read.close()
        return found

"""Which test runs which statement: the marks of ``lines.py`` by the id of each test, one file per test file.

A record is used as long as the test file's text is the one that was run. Statements of a source that was edited since
are not trusted: of such a source, all tests that ran any of it count.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.mutants import lines
from tests.mutants.child import forked, pytest_main, python_path, spent
from tests.mutants.population import ROOT, core, module_of

TESTS = ROOT / "tests"
# Neither of the core, or so slow that a mutant cannot wait for them.
LEFT_OUT = ("passes/backends", "browser", "integrations", "conformance", "benchmarks", "versions", "cuda", "mutants",
            "test_docs", "test_fuzz", "test_guard", "test_examples", "test_example_scripts", "test_rooms", "test_names",
            "test_source_distribution", "test_checkout", "test_random_programs")  # fmt: skip
FILE_LIMIT = 1200.0
BETWEEN = ""  # the statements run by imports, and else between two tests


def digest(path: Path) -> str:
    """Return a short hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_files() -> list[str]:
    """Return the test files that mutants may be killed by."""
    return [f for f in all_test_files() if not f.removeprefix("tests/").startswith(LEFT_OUT)]


def all_test_files() -> list[str]:
    """Return every test file."""
    return [str(p.relative_to(ROOT)) for p in sorted(TESTS.rglob("test_*.py"))]


class Layout:
    """The marks of all sources of the core as they are now."""

    def __init__(self):
        self.sources: dict[str, dict] = {}
        self.count = 0
        for file in core():
            at = lines.lines_of((ROOT / file).read_text())
            self.sources[file] = {"digest": digest(ROOT / file), "first": self.count, "lines": at}
            self.count += len(at)

    def write(self, folder: Path, code: Path) -> Path:
        """Write what ``lines.install`` reads."""
        (folder / "ran").write_bytes(bytes(self.count))
        code.mkdir(exist_ok=True)
        modules = {module_of(f): [str(ROOT / f), s["first"]] for f, s in self.sources.items()}
        given = folder / "lines.json"
        given.write_text(json.dumps({"ran": str(folder / "ran"), "code": str(code), "modules": modules}))
        return given


class Recorder:
    """A plugin of pytest that keeps what each test ran, and calls ``written`` with each file's when its tests end.

    ``known``: what is recorded of files by now, whose further tests are run.
    """

    def __init__(self, ran: mmap.mmap, known: dict[str, dict], written: Callable[[str, dict], None], most: float):
        self.ran, self.known, self.written, self.most = ran, known, written, most
        self.file = ""

    def _taken(self) -> bytes:
        taken = self.ran[:]
        self.ran[:] = bytes(len(taken))
        return taken

    def _begin(self, file: str) -> None:
        had = self.known.get(file, {"marks": {}, "times": {}, "failed": ()})
        self.file, self.marks, self.times, self.failed, self.cut = file, {}, dict(had["times"]), set(had["failed"]), 0
        self.marks = {test: _packed(marks) for test, marks in had["marks"].items()}
        self.between, self.file_started = had["marks"].get(BETWEEN, bytes(len(self.ran))), spent()

    def _end(self) -> None:
        if self.file:
            self._take_between()
            self.marks[BETWEEN] = _packed(self.between)
            times = {test: seconds for test, seconds in self.times.items() if test not in self.failed}
            known = {"times": times, "failed": sorted(self.failed), "cut": self.cut}
            self.written(self.file, {**known, "marks": self.marks})

    def _take_between(self) -> None:
        taken = int.from_bytes(self._taken(), "little") | int.from_bytes(self.between, "little")
        self.between = taken.to_bytes(len(self.ran), "little")

    def pytest_runtest_protocol(self, item, nextitem):
        file = item.nodeid.partition("::")[0]
        if file != self.file:
            self._end()
            self._begin(file)
        if (is_known := item.nodeid in self.marks) or spent() - self.file_started > self.most:
            self.cut += not is_known
            item.session._setupstate.teardown_exact(nextitem)  # else the next file finds this one's fixtures
            return True  # as if it had run
        return None

    def pytest_sessionfinish(self):
        self._end()

    def pytest_runtest_logstart(self, nodeid):
        self._take_between()
        self.test_started = spent()

    def pytest_runtest_logfinish(self, nodeid):
        self.times[nodeid] = spent() - self.test_started
        self.marks[nodeid] = _packed(self._taken())

    def pytest_runtest_logreport(self, report):
        if not report.passed:  # a test that is skipped kills nothing either
            self.failed.add(report.nodeid)


def _packed(marks: bytes) -> str:
    return base64.b85encode(zlib.compress(marks, 1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


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

    def is_whole(self, test_file: str) -> bool:
        """Say whether all tests of a file are recorded."""
        return self.is_recorded(test_file) and not self.notes(test_file)["cut"]

    def record(self, files: list[str], most: float) -> Iterator[str]:
        """Run test files in one fork, ``most`` seconds of processor time of each; yield what became of each file.

        A file of which tests were left out is gone on with. A file that ends the fork is recorded as without tests, and
        those after it are run in another fork.
        """
        while files:
            began = time.time()
            self._run(files, most)
            self._forget()
            done = [f for f in files if self.is_recorded(f) and self._path(f, "json").stat().st_mtime >= began]
            yield from (self._told(f) for f in done)
            files = [f for f in files if f not in done]
            if files and not done:
                self._write(files[0], {"times": {}, "failed": [], "cut": 0, "marks": {}}, Layout())
                self._forget()
                yield f"{files[0]}: ended the process, see {self._path(files[0], 'log')}"
                files = files[1:]

    def _run(self, files: list[str], most: float) -> None:
        layout = Layout()
        known = {f: self.notes(f) for f in files if self.is_recorded(f)}
        known = {f: notes for f, notes in known.items() if notes["sources"] == layout.sources}
        with tempfile.TemporaryDirectory(prefix="lines") as folder:
            given = layout.write(Path(folder), self.folder / "code")

            def body():
                os.environ["AMP_GRAPH_CACHE"] = str(self.cache)
                os.environ["PYTHONPATH"] = python_path()
                os.environ[lines.VARIABLE] = str(given)
                recorder = Recorder(lines.install(), known, lambda file, now: self._write(file, now, layout), most)
                return pytest_main(files, [recorder])

            forked(body, self._path(files[0], "log"), FILE_LIMIT * len(files))

    def _write(self, file: str, known: dict, layout: Layout) -> None:
        notes = {"digest": digest(ROOT / file), **known, "sources": layout.sources}
        self._path(file, "json").write_text(json.dumps(notes))

    def _told(self, file: str) -> str:
        notes = self.notes(file)
        cut = f", {notes['cut']} left out" if notes["cut"] else ""
        seconds = sum(notes["times"].values())
        return f"{file}: {len(notes['times'])} tests, {len(notes['failed'])} not passed{cut}, {seconds:.0f} s"

    def _forget(self) -> None:
        for read in (Map.notes, Map.times, Map.lines, Map.recorded):
            read.cache_clear()

    @cache  # noqa: B019
    def notes(self, test_file: str) -> dict:
        """Return what is written of a test file, the marks of its tests unpacked."""
        notes = json.loads(self._path(test_file, "json").read_text())
        notes["marks"] = {test: _unpacked(packed) for test, packed in notes["marks"].items()}
        return notes

    @cache  # noqa: B019
    def recorded(self) -> list[str]:
        """Return the recorded test files."""
        return [f for f in all_test_files() if self.is_recorded(f)]

    @cache  # noqa: B019
    def times(self) -> dict[str, float]:
        """Return the seconds of every recorded test that passed."""
        chosen = set(test_files())
        return {t: s for f in self.recorded() if f in chosen for t, s in self.notes(f)["times"].items()}

    @cache  # noqa: B019
    def lines(self, source: str) -> dict[int, set[str]]:
        """Return the tests that ran each line of a source; those of any line under 0, of a line unknown under -1."""
        now, found, chosen = (ROOT / source).read_text(), {0: set()}, set(test_files())
        of_line = lines.owners(now)
        for file in self.recorded():
            notes = self.notes(file)
            if file not in chosen or not (then := notes["sources"].get(source)):
                continue
            same = then["digest"] == digest(ROOT / source)
            for test in notes["times"]:
                marks = notes["marks"][test][then["first"] : then["first"] + len(then["lines"])]
                if any(marks):
                    found[0].add(test)
                    for line, number in of_line.items() if same else [(-1, marks.index(1))]:
                        if marks[number]:
                            found.setdefault(line, set()).add(test)
        return found

    def ran(self, source: str) -> tuple[list[int], bytes]:
        """Return the line of each statement of a source, and whether any recorded test file ran it as it is now."""
        at, any_of = lines.lines_of((ROOT / source).read_text()), 0
        for file in self.recorded():
            notes = self.notes(file)
            then = notes["sources"].get(source)
            if then and then["digest"] == digest(ROOT / source):
                for marks in notes["marks"].values():
                    any_of |= int.from_bytes(marks[then["first"] : then["first"] + len(at)], "little")
        return at, any_of.to_bytes(len(at), "little")

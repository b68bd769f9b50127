"""The tool itself: what it changes, how it samples, which tests it chooses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import hook


@pytest.fixture
def population():
    pytest.importorskip("cosmic_ray", reason="pip install 'amp-graph[mutation]'")
    from tests.mutants import population

    return population


def test_a_process_that_a_test_starts_imports_the_mutant_and_the_file_stays(tmp_path):
    file, site = tmp_path / "plain.py", Path(hook.__file__).parent / "site"
    file.write_text("x = 1\n")
    (tmp_path / "mutant.json").write_text(json.dumps({"module": "plain", "file": str(file), "source": "x = 2\n"}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(tmp_path)])}
    for more, printed in [({}, "1"), ({hook.VARIABLE: str(tmp_path / "mutant.json")}, "2")]:
        command = [sys.executable, "-c", "import plain; print(plain.x)"]
        ran = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == printed
    assert file.read_text() == "x = 1\n"


def test_annotations_are_left_out_and_what_is_computed_is_not(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    (tmp_path / "one.py").write_text("def f(x: int | None, y: float | None = None) -> int | None:\n    return x | y\n")
    found = population.places("one.py")
    assert {start for start, _ in found} == {(2, 13)}
    (mutants,) = found.values()
    assert {m.operator for m in mutants} > {"core/ReplaceBinaryOperator_BitOr_BitAnd"}
    by_and = next(m for m in mutants if m.operator.endswith("BitOr_BitAnd"))
    assert by_and.mutated().splitlines()[1].split() == ["return", "x", "&", "y"]
    assert (tmp_path / "one.py").read_text().endswith("x | y\n")


def test_every_mutant_can_be_made(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    source = "for x in not y, -1:\n    if x == 1 or x is None or x < y != 2:\n        z = x and y + 2.5\n"
    (tmp_path / "one.py").write_text(source)
    made = [mutant for found in population.places("one.py").values() for mutant in found]
    assert len(made) > 40
    assert all(m.mutated() != source for m in made)
    assert len({m.mutated() for m in made}) == len(made)


def test_every_file_has_its_share_of_a_sample_and_a_seed_gives_it_again(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    for name, lines in [("a.py", 10), ("b.py", 30)]:
        (tmp_path / name).write_text("".join(f"x{n} = {n}\n" for n in range(lines)))
    drawn = population.sample(["a.py", "b.py"], 8, seed=3)
    assert [m.file for m in drawn].count("a.py") == 2
    assert len({m.job for m in drawn}) == 8
    assert drawn == population.sample(["a.py", "b.py"], 8, seed=3)
    before = drawn[0].job
    (tmp_path / "a.py").write_text("x0 = 5\n")
    assert drawn[0].job != before  # a session tells that its mutants are of another source


def test_tests_of_the_line_are_chosen_the_mirrored_and_the_fast_ones_first(population, tmp_path, monkeypatch):
    from tests.mutants import choose

    monkeypatch.setattr(choose, "ROOT", tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "load.py").write_text("A = 1\ndef f():\n    return 1\n    return 2\n    return 3\n")

    far, near, own, slow = (
        "tests/test_x.py::f",
        "tests/lists/test_y.py::n",
        "tests/lists/test_load.py::o",
        "tests/z.py::s",
    )

    class Covered:
        def lines(self, source):
            return {0: {far, near, own, slow}, 1: {slow}, 3: {far, near, own, slow}, 4: {far}}

        def is_recorded(self, file):
            return False

        def times(self):
            return {far: 1.0, near: 3.0, own: 5.0, slow: 50.0}

    def mutant(line):
        return population.Mutant("lists/load.py", "core/AddNot", 0, (line, 0), (line, 4), "")

    def chosen(line, seconds):
        return choose.chosen(mutant(line), Covered(), seconds)

    monkeypatch.setattr(choose, "test_files", list)
    assert chosen(3, seconds=30.0) == [own, near, far]  # the slow one takes too long
    assert chosen(4, seconds=30.0) == [far]
    assert chosen(1, seconds=5.0) == [own]  # outside of functions: any test that runs the file
    monkeypatch.setattr(choose, "test_files", lambda: ["tests/test_x.py", "tests/lists/test_y.py"])
    (tmp_path / "tests" / "lists").mkdir(parents=True)
    (tmp_path / "tests" / "test_x.py").write_text("from amp_graph.lists.load import load\n")
    (tmp_path / "tests" / "lists" / "test_y.py").write_text("")
    assert chosen(5, seconds=30.0) == ["tests/test_x.py", "tests/lists/test_y.py"]  # of no recorded line


def test_the_interval_is_wilsons(population):
    from tests.mutants.table import interval

    low, high = interval(85, 100)
    assert (low, high) == pytest.approx((0.7672, 0.9069), abs=1e-4)
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(20, 20)[1] == pytest.approx(1.0)


class Ran:
    """A map in which some statements of a file are run."""

    def __init__(self, source, marks):
        self.source, self.marks = source, marks

    def ran(self, file):
        from tests.mutants import lines

        return lines.lines_of(self.source), self.marks


def test_what_only_type_checkers_read_is_no_missing_statement(population, tmp_path, monkeypatch):
    from tests.mutants import coverage_table

    source = "import typing\nif typing.TYPE_CHECKING:\n    import os\n\n"
    source += "def f(x):\n    ...\n\ndef g(x):\n    y = 1\n    return y\n"
    (tmp_path / "one.py").write_text(source)
    monkeypatch.setattr(coverage_table, "ROOT", tmp_path)
    found = coverage_table.covered("one.py", Ran(source, bytes([1, 1, 0, 1, 0, 1, 0, 0])))
    assert found == coverage_table.Covered("one.py", 6, (9, 10))
    assert found.share == pytest.approx(66.67, abs=0.01)
    assert coverage_table.ranges((1, 2, 3, 7, 9, 10)) == "1-3, 7, 9-10"


def test_the_tests_of_a_file_that_came_after_the_limit_are_mapped_when_it_is_gone_on_with(population, tmp_path):
    from tests.mutants.coverage_map import BETWEEN, Recorder

    class Item:
        session = type(
            "Session", (), {"_setupstate": type("State", (), {"teardown_exact": staticmethod(lambda item: None)})()}
        )

        def __init__(self, nodeid):
            self.nodeid = nodeid

    def ran(names, runnable, known, most):
        written, marks = {}, bytearray(4)
        recorder = Recorder(marks, known, written.__setitem__, most)
        for number, name in enumerate(names):
            if recorder.pytest_runtest_protocol(Item(name), None) is None:
                assert name in runnable
                marks[3] = 1  # of a fixture, or an import
                recorder.pytest_runtest_logstart(name)
                marks[number] = 1
                recorder.pytest_runtest_logfinish(name)
                recorder.file_started -= 10.0  # as if it had taken as long
        recorder.pytest_sessionfinish()
        return {file: {**of, "marks": unpacked(of["marks"])} for file, of in written.items()}

    def unpacked(marks):
        from tests.mutants.coverage_map import _unpacked

        return {test: _unpacked(packed) for test, packed in marks.items()}

    names = ["a::x", "a::y", "b::z"]
    first = ran(names, {"a::x", "b::z"}, {}, most=5.0)
    assert first["a"]["cut"] == 1
    assert first["a"]["marks"] == {"a::x": b"\1\0\0\0", BETWEEN: b"\0\0\0\1"}
    assert first["b"]["cut"] == 0
    then = ran(names[:2], {"a::y"}, first, most=5.0)
    assert then["a"]["cut"] == 0
    assert then["a"]["marks"] == {"a::x": b"\1\0\0\0", "a::y": b"\0\1\0\0", BETWEEN: b"\0\0\0\1"}
    assert then["a"]["times"].keys() == {"a::x", "a::y"}

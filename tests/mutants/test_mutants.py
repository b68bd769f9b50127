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
    by_and = next(m for m in mutants if m.operator_name == "core/ReplaceBinaryOperator_BitOr_BitAnd")
    assert population.mutated(by_and).splitlines()[1].split() == ["return", "x", "&", "y"]
    assert (tmp_path / "one.py").read_text().endswith("x | y\n")


def test_every_mutant_can_be_made(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    source = "for x in not y, -1:\n    if x == 1 or x is None or x < y != 2:\n        z = x and y + 2.5\n"
    (tmp_path / "one.py").write_text(source)
    made = [mutant for found in population.places("one.py").values() for mutant in found]
    assert len(made) > 40
    assert len({population.mutated(m) for m in made} - {source}) == len(made)


def test_every_file_has_its_share_of_a_sample_and_a_seed_gives_it_again(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    for name, lines in [("a.py", 10), ("b.py", 30)]:
        (tmp_path / name).write_text("".join(f"x{n} = {n}\n" for n in range(lines)))
    drawn = population.sample(["a.py", "b.py"], 8, seed=3)
    assert [str(m.module_path) for m in drawn].count("a.py") == 2
    assert len({population.item_of(m).job_id for m in drawn}) == 8
    assert drawn == population.sample(["a.py", "b.py"], 8, seed=3)
    before = population.item_of(drawn[0]).job_id
    (tmp_path / "a.py").write_text("x0 = 5\n")
    assert population.item_of(drawn[0]).job_id != before  # a session tells that its mutants are of another source


def test_the_mirrored_tests_come_first_then_those_that_name_the_module(population, tmp_path, monkeypatch):
    monkeypatch.setattr(population, "ROOT", tmp_path)
    for name, text in [("lists/test_load", ""), ("lists/test_y", ""), ("test_far", ""),
                       ("test_x", "from amp_graph.lists.load import load\n")]:  # fmt: skip
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    ordered = ["tests/lists/test_load.py", "tests/test_x.py", "tests/lists/test_y.py"]
    assert population.tests_of("lists/load.py") == ordered


def test_a_session_kills_a_mutant_and_names_a_survivor_without_a_reason(population, monkeypatch, tmp_path, capsys):
    from tests.mutants import __main__ as tool

    file = "lists/path_pattern.py"
    mutants = [m for found in population.places(file).values() for m in found]
    monkeypatch.setattr(tool, "sample", lambda files, count, seed: mutants[:1])
    monkeypatch.setattr(tool, "mutated", lambda spec: "raise ImportError")
    options = ["--folder", str(tmp_path / "killed"), "--only", file]
    monkeypatch.setattr(tool, "tests_of", lambda file: ["tests/lists/test_path_pattern.py"])
    assert tool.main(options) == 0
    assert "1 of 1 killed" in capsys.readouterr().out
    monkeypatch.setattr(tool, "mutated", lambda spec: (population.ROOT / file).read_text() + "# changed")
    assert tool.main(options) == 0  # it is tested already
    assert tool.main(["--folder", str(tmp_path / "alive"), "--only", file]) == 1
    told = capsys.readouterr().out
    assert "0 of 1 killed" in told
    assert "# changed" in told
    monkeypatch.setattr(tool, "reasons", lambda: {(file, "", "# changed"): "a comment"})
    assert tool.main(["--folder", str(tmp_path / "alive"), "--only", file]) == 0


def test_the_interval_is_wilsons_and_all_reasons_are_of_a_kind(population):
    from tests.mutants.__main__ import interval, reasons

    low, high = interval(85, 100)
    assert (low, high) == pytest.approx((0.7672, 0.9069), abs=1e-4)
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(20, 20)[1] == pytest.approx(1.0)
    assert all(reasons().values())

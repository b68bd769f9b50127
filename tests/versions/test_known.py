"""The table of differences between versions hides no failure, and outlives none."""

import re

import pytest

from tests.versions import environments
from tests.versions.__main__ import SELECTED
from tests.versions.environments import ROOT, Corner
from tests.versions.known import Difference, compared, differences, outcome

ROWS = [Difference(("tests/a.py::test_one", "tests/a.py::test_two[x-1]"), "2.11", "torch 2.11 lacks it")]

JUNIT = """<testsuites><testsuite>
<testcase file="tests/a.py" name="test_one[y]"><failure message="no">...</failure></testcase>
<testcase file="tests/a.py" name="test_setup"><error message="no">...</error></testcase>
<testcase file="tests/a.py" name="test_gpu"><skipped message="needs a GPU" /></testcase>
<testcase file="tests/a.py" name="test_gpu_too"><skipped message="needs a GPU" /></testcase>
<testcase file="tests/a.py" name="test_fine" />
</testsuite></testsuites>"""


def test_a_failure_that_no_row_names_is_told():
    found = compared(["tests/a.py::test_one[y]", "tests/a.py::test_two[x-1]", "tests/b.py::test_c"], "2.11.0", ROWS)
    assert found.known == ("tests/a.py::test_one[y]", "tests/a.py::test_two[x-1]")
    assert found.unknown == ("tests/b.py::test_c",)
    assert not found.is_clean


@pytest.mark.parametrize("failed", [[], ["tests/a.py::test_one[y]", "tests/a.py::test_two[x-2]"]])
def test_a_row_that_no_failure_bears_out_is_told(failed):
    found = compared(failed, "2.11.0", ROWS)
    assert "tests/a.py::test_two[x-1]" in found.stale
    assert not found.is_clean


def test_a_row_is_of_one_version():
    assert compared(["tests/a.py::test_one[y]"], "2.12.1", ROWS).unknown == ("tests/a.py::test_one[y]",)
    assert compared([], "2.12.1", ROWS).is_clean


def test_results_of_pytest_are_read(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = outcome(tmp_path / "junit.xml")
    assert found.passed == 1
    assert found.failed == ("tests/a.py::test_one[y]", "tests/a.py::test_setup")
    assert found.skipped == {"needs a GPU": 2}


def test_the_same_tests_are_selected_as_by_make_test():
    assert re.search(r'^\t.*pytest .* -m "(not slow[^"]*)"', (ROOT / "Makefile").read_text(), re.M)[1] == SELECTED


def test_an_interpreter_of_pyenv_is_found_whose_shim_fails(tmp_path, monkeypatch):
    shim = tmp_path / "shims" / "python3.99"
    python = tmp_path / "versions" / "3.99.1" / "bin" / "python3.99"
    for path, text in ((shim, "#!/bin/sh\nexit 127\n"), (python, "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(environments.shutil, "which", lambda name: str(shim) if name == "python3.99" else None)
    assert Corner("3.99", "2.13.0").interpreter() == str(python)
    assert Corner("3.98", "2.13.0").interpreter() is None


def test_rows_of_the_table_name_tests_that_exist():
    for row in differences():
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_a_row_names_each_version_in_which_its_tests_fail(tmp_path):
    (tmp_path / "known.toml").write_text('[[difference]]\ntests = ["a"]\ntorch = ["2.11", "2.12"]\ncause = "x"\n')
    assert [row.torch for row in differences(tmp_path / "known.toml")] == ["2.11", "2.12"]
    assert all(re.fullmatch(r"2\.\d+", row.torch) for row in differences())


def test_a_row_without_a_cause_is_refused():
    with pytest.raises(ValueError, match="needs tests and a cause"):
        Difference(("tests/a.py::test_one",), "2.11", " ")

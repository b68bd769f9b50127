"""The table of differences between versions hides no failure, and outlives none."""

import pytest

from tests.versions.environments import ROOT
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


def test_rows_of_the_table_name_tests_that_exist():
    for row in differences():
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_a_row_without_a_cause_is_refused():
    with pytest.raises(ValueError, match="needs tests and a cause"):
        Difference(("tests/a.py::test_one",), "2.11", " ")

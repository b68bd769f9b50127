"""The table of differences between versions hides no failure, and outlives none."""

import re

import pytest

from tests.versions import known
from tests.versions.__main__ import SELECTED
from tests.versions.environments import ROOT

ROWS = """
[[difference]]
tests = ["test_here.py::test_one[x]", "test_here.py::test_two"]
torch = ["2.11", "2.12"]
cause = "it lacks that"
"""


class Item:
    def __init__(self, nodeid):
        self.nodeid, self.marks = nodeid, []

    def add_marker(self, mark):
        self.marks.append((mark.name, mark.kwargs))


@pytest.mark.parametrize(("torch", "marked"), [("2.11.0", 2), ("2.12.1", 2), ("2.13.0", 0)])
def test_what_is_known_of_a_version_has_to_fail_there_and_nowhere_else(torch, marked, tmp_path, monkeypatch):
    (tmp_path / "known.toml").write_text(ROWS)
    monkeypatch.setattr(known.differences, "__defaults__", (None, tmp_path / "known.toml"))
    names = ["test_one[x]", "TestMore::test_two", "test_one[y]", "test_twofold"]
    items = [Item(f"test_here.py::{name}") for name in names]
    known.expect(items, torch)
    expected = [("xfail", {"strict": True, "reason": "it lacks that"})]
    assert [item.marks for item in items] == [expected] * marked + [[]] * (4 - marked)


def test_the_same_tests_are_selected_as_by_make_test():
    assert re.search(r'^\t.*pytest .* -m "(not slow[^"]*)"', (ROOT / "Makefile").read_text(), re.M)[1] == SELECTED


def test_rows_of_the_table_name_tests_that_exist():
    for test in known.differences():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test

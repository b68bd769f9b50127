"""The source distribution has every file of the repository, so that its tests, pages and targets of make work."""

import subprocess

import pytest

from tests.doc_blocks import ROOT

ALWAYS = {"LICENSE", "README.md", "pyproject.toml"}  # setuptools adds them


def left_out(names, manifest):
    """Return the ``names`` that no line of ``manifest`` includes."""
    lines = [line.split() for line in manifest.splitlines() if line and line[0] != "#"]
    folders = {words[1] for words in lines if words[0] == "graft"}
    files = {name for words in lines if words[0] == "include" for name in words[1:]} | ALWAYS
    return [name for name in names if name not in files and name.partition("/")[0] not in folders]


def test_every_file_is_in_the_source_distribution():
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout: an unpacked source distribution, for example")
    assert left_out(found.stdout.splitlines(), (ROOT / "MANIFEST.in").read_text()) == []


def test_a_file_that_is_left_out_is_found():
    manifest = "# a comment\ngraft tests\ninclude Makefile\n"
    assert left_out(["tests/a.py", "Makefile", "README.md", "new/b.py", "c.txt"], manifest) == ["new/b.py", "c.txt"]

"""Planted faults: each is found at its line, its corrected twin has no such finding, and no bit of a script changes."""

import pytest

from tests.audit.running import CLEAN, SCRIPTS, assert_readable, expected, found, run_script


def assert_found_at_its_line(path):
    """Run a script four times: faulty and right, audited and not."""
    wanted = expected(path)
    assert wanted
    faulty, right = run_script(path, "faulty"), run_script(path, "right")
    assert wanted <= found(faulty, path)
    assert not {code for code, _ in wanted} & {f.code for f in right.report.findings}
    assert right.error == ""
    for audited, word in ((faulty, "faulty"), (right, "right")):
        plain = run_script(path, word, audited=False)
        assert audited.printed == plain.printed != ""
        assert (audited.error, audited.random) == (plain.error, plain.random)
        assert not [one for one in audited.report.unseen if "compiled" not in one]
        assert_readable(audited.report)


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_planted_fault_is_found_at_its_line_and_changes_no_bit(path):
    assert_found_at_its_line(path)


@pytest.mark.parametrize("path", sorted(CLEAN.glob("*.py")), ids=lambda path: path.stem)
def test_a_clean_script_has_no_warning_and_changes_no_bit(path):
    audited, plain = run_script(path), run_script(path, audited=False)
    assert [f for f in audited.report.findings if f.level != "note"] == []
    assert not audited.error
    assert audited.report.looked_at
    assert_readable(audited.report)
    assert not [one for one in audited.report.unseen if "ended" in one]
    assert audited.printed == plain.printed != ""
    assert (audited.error, audited.random) == (plain.error, plain.random)

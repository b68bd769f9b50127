"""docs/audit.md: its script prints what the page shows, before and after its fault; its code runs."""

import re
import sys
from pathlib import Path

import pytest

from amp_graph.cli.main import main, parser
from tests.doc_blocks import blocks_of, given, run_blocks

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"
BLOCKS = blocks_of(PAGE)
SCRIPT, PROGRAM = (block for block in BLOCKS if block.language == "python")
REGION = re.compile(r"( +with torch.autocast.*\n)((?: {8}.*\n)+)(    loss = .*\n)")


@pytest.fixture
def printed(tmp_path, monkeypatch, capfd):
    """Return the lines that the page's command prints of a script."""
    monkeypatch.chdir(tmp_path)
    for place, name in ((sys, "argv"), (sys, "excepthook")):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(script):
        (tmp_path / "train.py").write_text(script)
        assert main(["audit", "train.py"]) == 0
        return "".join(capfd.readouterr()).splitlines()

    return run


def missing(shown, lines):
    """Return the lines of a block that were not printed; three dots stand for anything."""
    wanted = [".*".join(map(re.escape, line.split("..."))) for line in shown.splitlines() if line]
    return [one for one in wanted if not any(re.fullmatch(one, line) for line in lines)]


def moved(script):
    """Return the script with the call of the model in the region, as the page says."""
    return REGION.sub(lambda m: re.sub(r"(?m)^    ", "", m[2]) + m[1] + "    " + m[3], script)


def test_the_script_and_the_command_of_the_page_print_what_it_shows(printed):
    (shown,) = [block.code for block in BLOCKS if block.language == "console"]
    assert missing(shown.partition("\n")[2], printed(SCRIPT.code)) == []


def test_the_corrected_script_prints_the_table_of_the_page(printed):
    shown = next(block.code for block in BLOCKS if block.code.startswith("  module"))
    lines = printed(moved(SCRIPT.code))
    assert missing(shown, lines) == []
    assert [line for line in lines if "AMP101" in line] == []


def test_the_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_blocks([PROGRAM], given())
    assert "looked at steps 2, 3 of 3" in capsys.readouterr().out
    assert "<h1>amp_graph audit" in (tmp_path / "audit.html").read_text()


def test_the_page_names_every_option():
    audit = next(a for a in parser()._actions if a.choices and "audit" in a.choices).choices["audit"]
    words = {word for action in audit._actions for word in action.option_strings if word.startswith("--")}
    assert {word for word in words if word not in PAGE.read_text()} == {"--help"}


def test_control_what_is_not_printed_is_missing():
    assert missing("a ... c\nd", ["a b c", "e"]) == ["d"]

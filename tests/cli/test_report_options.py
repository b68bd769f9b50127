"""``--report`` and ``--measure`` of ``amp-graph dump`` and ``explain``."""

import pytest

from amp_graph.cli.main import main
from tests.report.pages import Page

MODEL = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)), torch.randn(8, 16)
"""


@pytest.fixture
def target(tmp_path):
    (tmp_path / "given.py").write_text(MODEL)
    return f"{tmp_path / 'given.py'}:build"


def page_at(path):
    return Page(path.read_text(encoding="utf-8"))


def test_dump_writes_the_report_beside_what_it_prints(target, tmp_path, capsys):
    assert main(["dump", target, "--policy", "bf16", "--report", str(tmp_path / "r.html"), "--measure"]) == 0
    assert "linear" in capsys.readouterr().out
    text = page_at(tmp_path / "r.html").text("card-time")
    assert text.startswith("Speed against fp32 predicted measured fp32 1.00 × 1.00 ×")
    assert text.count(" ms") + text.count(" us") == 3


def test_explain_opens_the_report_at_its_node(target, tmp_path, capsys):
    assert main(["explain", target, "gelu", "--policy", "bf16", "--report", str(tmp_path / "r.html")]) == 0
    page = page_at(tmp_path / "r.html")
    graph, _, name = page.data["chosen"].partition(":")
    assert graph == "0"
    assert dict(zip(page.column("name"), page.column("op"), strict=True))[name].startswith("gelu")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--measure"], "--measure is for the report"),
        (["--report", "/nowhere/at/all.html"], "dump: cannot write /nowhere/at/all.html"),
        (["--step", "--report", "r.html"], "--report is of a model's graphs"),
    ],
)
def test_what_cannot_be_is_told_in_one_error(target, capsys, words, told):
    assert main(["dump", target, "--policy", "bf16", *words]) == 1
    err = capsys.readouterr().err
    assert told in err
    assert "legal:" in err
    assert "fix:" in err

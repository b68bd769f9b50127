"""The examples of docs/numerics.md on calibrating, comparing and bisecting run, one after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.mark.filterwarnings("ignore:.*nothing in this process scales:amp_graph.errors.AmpGraphWarning")
def test_the_blocks_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    _, _, part = PAGE.read_text().partition("## Before the training")
    for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert "run.json: its value: max 4.8e5 > 65504 in 4 of 4 batches" in said
    assert names["policy"].kept == ()

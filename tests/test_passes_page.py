"""The pages on passes are what the table of passes gives."""

import json
from pathlib import Path

import pytest

from amp_graph.passes.pipeline_row import Phase
from amp_graph.step.step_table import EVERY
from tests.doc_blocks import module_at

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture
def generate():
    return module_at(DOCS / "generate.py", "generate_docs")


def test_the_pages_agree_with_the_table(generate, capsys):
    assert (generate.main(["--check"]), capsys.readouterr().out) == (0, ""), "python docs/generate.py"


def test_the_diagram_names_every_pass(generate):
    shown = generate.diagram()
    assert [row.name for row in EVERY if row.name not in shown] == []
    assert {*generate.DIAGRAM} == {*Phase}


def test_the_page_says_what_each_word_of_the_table_means():
    text = (DOCS / "internals/passes.md").read_text()
    assert all(f"| `{phase.value}` |" in text for phase in Phase)
    assert all(f"| {word} |" in text for word in {need.word for row in EVERY for need in row.needs})


def test_a_stale_page_is_named_and_written(generate, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    (tmp_path / "internals").mkdir()
    pages = {
        "internals/passes.md": "fuse-gelu",
        "internals/how-it-works.md": "fuse-gelu",
        "internals/audit-codes.md": "## AMP101",
        "policy.md": "| `fp32_inside=` |",
    }
    for page, word in pages.items():
        (tmp_path / page).write_text((DOCS / page).read_text().replace(word, "another"))
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == f"out of date: {', '.join(pages)}\n"
    assert generate.main([]) == generate.main(["--check"]) == 0
    assert (tmp_path / "internals/passes.md").read_text() == (DOCS / "internals/passes.md").read_text()
    (tmp_path / "internals/passes.md").write_text("no markers")
    with pytest.raises(SystemExit, match=r"docs/internals/passes.md: 0 regions 'table'(?s:.*)fix:"):
        generate.main([])


def test_the_worth_of_a_pass_is_what_was_measured(generate, tmp_path, monkeypatch):
    def row(name, model, time, low, peak=None, saved=None):
        return dict(
            name=name, model=model, way="convert", changes=1, time=time, low=low, high=2, peak=peak, saved=saved
        )

    rows = [
        row("lower-linears", "gpt", 1.2, 1.1, 1.5),
        row("lower-linears", "bert", 1.3, 0.9, 1.1),  # the quartiles say that this is noise
        row("recompute-activations", "gpt", 0.98, 0.95, 1.02, 1.41),
        row("fuse-gelu", "gpt", 1.004, 1.001, 1.0),
    ]
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    assert generate.worth() == {}
    (tmp_path / "zen4").mkdir()
    (tmp_path / "ablation.json").write_text(json.dumps({"rows": rows[:2]}))
    (tmp_path / "zen4/ablation.json").write_text(json.dumps({"rows": rows[2:]}))
    assert generate.worth() == {
        "lower-linears": "time without it 1.20 (gpt, convert)",
        "recompute-activations": "saved memory without it 1.41 (gpt, convert)",
        "fuse-gelu": "no gain measured",
    }
    (line,) = (one for one in generate.table().splitlines() if one.startswith("| `lower-linears`"))
    assert "| time without it 1.20 (gpt, convert) |" in line

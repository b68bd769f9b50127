"""The table of what each pass is worth: rows of former names, what earns its place, and a run from end to end."""

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def row(name, model, time, low, peak=None, saved=None, scale=0.25):
    same = dict(way="convert", changes=1, high=2.0)
    return dict(name=name, model=model, time=time, low=low, peak=peak, saved=saved, scale=scale, **same)


def test_the_table_says_what_stays(tmp_path):
    import ablation
    from result_file import machine

    path = tmp_path / "a"
    rows = [
        row("lower-linears", "gpt", 1.20, 1.10, 1.0),
        row("lower-linears", "bert", 1.40, 0.90),  # the quartiles say that this is noise
        row("recompute-activations", "gpt", 0.98, 0.95, 1.0, 1.41),
        row("attention", "gpt", 1.02, 1.01, 1.04),
        row("share-casts", "gpt", 1.0, 0.99, 1.0),
        row("depthwise", "ghostnet", 1.02, 1.01, 1.0),
        row("depthwise", "ghostnet", 1.04, 1.04, 1.0, scale=1.0),
        row("backend", "gpt", 1.3, 1.2, 1.0),
    ]  # fmt: skip
    held = {"machine": machine("cpu"), "options": {"threads": 1}, "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(held))
    ablation.main(["--table", "--output", str(path)])
    text = path.with_suffix(".md").read_text()
    wanted = [
        "| lower-linears | 2 | 1.20 | gpt, convert | 1.00 | gpt, convert | yes |",
        "| recompute-activations | 1 | 0.98 | gpt, convert | 1.41 | gpt, convert | **no** |",
        "| attention | 1 | 1.02 | gpt, convert | 1.04 | gpt, convert | **no** |",
        "| share-casts | 1 | 1.00 | gpt, convert | 1.00 | gpt, convert | exactness: ",
        "| depthwise | 1 | 1.04 | ghostnet, convert | 1.00 | ghostnet, convert | **no** |",
        "| backend | 1 | 1.30 | gpt, convert | 1.00 | gpt, convert | yes |",
        "models at 0.25, 1 of their sizes",
        "| channels-last | 0 | | | | | not measured |",
        "| lower-linears | gpt | convert | 0.25 | 1 | 1.200 | 1.100-2.000 | 1.00 |  |",
    ]
    assert [line for line in wanted if line not in text] == []


@pytest.mark.multiplied
def test_one_model_from_beginning_to_end(tmp_path):
    import ablation

    words = ["--models", "mlp", "--ways", "convert", "--rounds", "2", "--scale", "0.25"]
    ablation.main([*words, "--passes", "lower-linears", "--output", str(tmp_path / "a")])
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {(one["name"], one["model"]) for one in rows} == {("lower-linears", "mlp"), ("backend", "mlp")}
    for one in rows:
        assert one["low"] <= one["time"] <= one["high"]
    assert "| channels-last | 0 |" in (tmp_path / "a.md").read_text()
    with pytest.raises(SystemExit, match="--output another path"):
        ablation.main([*words, "--threads", "2", "--output", str(tmp_path / "a")])


GAINS = {
    "one model by a tenth": ([("gpt", 1.10, None)], True),
    "two models by 3 %": ([("gpt", 1.03, None), ("bert", 1.03, None)], True),
    "memory of two models": ([("gpt", 0.9, 1.10), ("bert", 0.9, 1.10)], True),
    "one model twice": ([("gpt", 1.05, 1.2), ("gpt", 1.05, 1.2)], False),
    "a little less": ([("gpt", 1.099, 1.2), ("bert", 1.02, 1.09)], False),
    "nothing": ([], False),
}


@pytest.mark.parametrize("name", GAINS)
def test_the_law(name):
    import ablation

    gains, expected = GAINS[name]
    rows = [
        ablation.Row("a-pass", model, "convert", 1, low + 0.01, low, low + 0.02, peak) for model, low, peak in gains
    ]
    assert ablation.stays(rows) is expected


def test_every_optional_pass_stays_by_the_law():
    """By the committed table of one processor; or it says which exactness, capability or device it is there for."""
    import ablation

    from amp_graph.passes.pipeline_table import TABLE

    tables = [
        [ablation.Row(**one) for one in json.loads(path.read_text())["rows"]] for path in RESULTS.rglob("ablation.json")
    ]
    optional = {row.name: row for row in TABLE if row.skippable}
    gone = {row.name for rows in tables for row in rows} - {*optional, *ablation.GROUPS}
    assert not gone, "rows of passes that are gone"
    for name, known in optional.items():
        by_figures = any(ablation.stays([row for row in rows if row.name == name]) for rows in tables)
        reason = re.match(r"exactness: .*\d|capability: |not measured: (AMX|CUDA)$", known.worth or "")
        assert by_figures or reason, name

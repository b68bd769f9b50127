"""The table of what each pass is worth: rows of former names, what earns its place, and a run from end to end."""

import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def row(name, model, time, low, peak=None, saved=None, scale=0.25):
    same = dict(way="convert", changes=1, high=2.0)
    return dict(name=name, model=model, time=time, low=low, peak=peak, saved=saved, scale=scale, **same)


@pytest.fixture
def held(tmp_path):
    """A file of results, by path without suffix, with these rows."""
    from result_file import machine

    def make(rows):
        options = {"threads": 1}
        (tmp_path / "a.json").write_text(json.dumps({"machine": machine("cpu"), "options": options, "rows": rows}))
        return tmp_path / "a"

    return make


def test_the_table_says_what_earns_its_place(held):
    import ablation

    path = held([
        row("fuse-add-norm", "gpt", 1.20, 1.10, 1.0),
        row("fuse-add-norm", "bert", 1.40, 0.90),  # the quartiles say that this is noise
        row("recompute-activations", "gpt", 0.98, 0.95, 1.0, 1.41),
        row("attention", "gpt", 1.02, 1.01, 1.04),
        row("share-casts", "gpt", 1.0, 0.99, 1.0),
        row("fuse-gram-matrix", "dlrm", 1.02, 1.01, 1.0),
        row("fuse-gram-matrix", "dlrm", 1.04, 1.01, 1.0, scale=1.0),
    ])  # fmt: skip
    ablation.main(["--table", "--output", str(path)])
    text = path.with_suffix(".md").read_text()
    assert "| fuse-add-norm | 2 | 1.20 | gpt, convert | 1.00 | gpt, convert | yes |" in text
    assert "| recompute-activations | 1 | 0.98 | gpt, convert | 1.41 | gpt, convert | yes |" in text
    assert "| attention | 1 | 1.02 | gpt, convert | 1.04 | gpt, convert | **no** |" in text
    assert "| share-casts | 1 | 1.00 | gpt, convert | 1.00 | gpt, convert | needed: accuracy" in text
    assert "| fuse-gram-matrix | 1 | 1.04 | dlrm, convert | 1.00 | dlrm, convert | yes |" in text
    assert "models at 0.25, 1 of their sizes" in text
    assert "| fuse-gelu | 0 | | | | | not measured |" in text
    assert "| fuse-add-norm | gpt | convert | 0.25 | 1 | 1.200 | 1.100-2.000 | 1.00 |  |" in text


@pytest.mark.multiplied
def test_one_model_from_beginning_to_end(tmp_path):
    import ablation

    words = ["--models", "mlp", "--ways", "convert", "--rounds", "2", "--scale", "0.25"]
    ablation.main([*words, "--passes", "lower-linears", "--output", str(tmp_path / "a")])
    for one in json.loads((tmp_path / "a.json").read_text())["rows"]:
        assert (one["name"], one["model"]) == ("lower-linears", "mlp")
        assert one["low"] <= one["time"] <= one["high"]
    assert "| fuse-gelu | 0 |" in (tmp_path / "a.md").read_text()
    with pytest.raises(SystemExit, match="--output another path"):
        ablation.main([*words, "--threads", "2", "--output", str(tmp_path / "a")])

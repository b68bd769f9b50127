"""The benchmark of accuracy over seeds: its seeds differ, its verdict is right, and it sees a variant that fails."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from amp_graph.demo.variants import VARIANTS

# Nothing to capture, and no scaler: fp16 as one should not train with it.
UNSCALED = [dataclasses.replace(v, scaled=False) for v in VARIANTS["fp16"] if not v.policy]
PATH = Path(__file__).parents[2] / "benchmarks" / "accuracy_over_seeds.py"


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("accuracy_over_seeds", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_seed_and_variant_is_trained_and_printed(benchmark, tmp_path, capsys):
    words = ["--quick", "--models", "cnn", "--seeds", "2", "--steps", "3", "--threads", "1"]
    found = benchmark.main([*words, "--json", str(tmp_path / "found.json")])["cnn"]
    assert [one.variant for one in found] == ["fp32", "autocast fp16", "amp_graph fp16"]
    for one in found:
        assert len(one.accuracy) == len(one.loss) == len(one.skipped) == 2
        assert one.loss[0] != one.loss[1]
        assert one.loss == pytest.approx(found[0].loss, rel=1e-2)
    assert found[0].loss != found[2].loss  # fp16 was used
    assert json.loads((tmp_path / "found.json").read_text())["results"]["cnn"][0]["loss"] == found[0].loss
    assert capsys.readouterr().out.count("| cnn |") == 3


@pytest.mark.slow
def test_a_scale_that_grows_too_often_skips_steps(benchmark):
    grows = [dataclasses.replace(v, growth_interval=1) for v in VARIANTS["fp16"]]
    fp32, autocast, ours = benchmark.trained("cnn", grows, [0], 16, quick=True)
    assert fp32.skipped == [0]
    assert autocast.skipped == ours.skipped
    assert 2 < ours.skipped[0] < 10


def test_a_seed_trains_the_same_again(benchmark):
    once, again, other = (benchmark.trained("gpt", UNSCALED, [seed], 2, quick=True)[0].loss for seed in (5, 5, 6))
    assert once == again != other


@pytest.mark.parametrize(
    ("mine", "said"), [([2.9, 2.9], "yes"), ([3.5, 2.7], "no: +1.1000"), ([1, 1], "yes"), ([0.5, 0.5], "no: -1.5000")]
)
def test_verdict(benchmark, mine, said):
    assert benchmark.verdict(mine, [1, 2, 3]) == said


def test_a_variant_that_does_not_train_is_seen(benchmark, monkeypatch):
    made = benchmark.task
    faint = lambda name, quick: dataclasses.replace(made(name, quick=quick), weight=2.0**-40)  # noqa: E731
    monkeypatch.setattr(benchmark, "task", faint)
    found = benchmark.trained("gpt", UNSCALED, [0, 1], 10, quick=True)
    reference, broken = benchmark.rows("gpt", found)
    assert "no: +" in broken
    assert "no" not in reference


def test_a_single_seed_is_refused(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--seeds", "1"])
    assert "a spread needs at least 2" in capsys.readouterr().err

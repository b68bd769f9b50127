"""The benchmark of accuracy over seeds: its seeds differ, its verdict is right, and it sees a variant that fails."""

import dataclasses
import importlib
import json

import pytest

from examples.demo.variants import VARIANTS

# Nothing to capture, and no scaler: fp16 as one should not train with it.
UNSCALED = [dataclasses.replace(v, scaled=False) for v in VARIANTS["fp16"] if not v.policy]


@pytest.fixture
def benchmark():
    return importlib.import_module("accuracy_over_seeds")


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


def test_a_training_whose_loss_is_not_a_number_is_farther_from_fp32_than_its_spread(benchmark):
    fine, broken = {"accuracy": 0.9, "loss": 0.5, "skipped": 0}, {"accuracy": 0.1, "loss": None, "skipped": 40}
    seeds = {str(seed): {"fp32": fine | {"loss": 0.5 + seed}, "fp16": broken} for seed in range(2)}
    first, second = benchmark.rows("t5", benchmark.figures_of(seeds))
    assert "| 90.00%" in first
    assert second == "| t5 | fp16 | 10.00% ± 0.00% | no: -0.8000 | NaN | no | 40, 40 |"


@pytest.mark.slow
def test_trainings_as_on_a_gpu_are_kept_and_not_repeated(benchmark, tmp_path, monkeypatch):
    words = ["--emulate", "--quick", "--models", "resnet", "--seeds", "2", "--steps", "4", "--threads", "1"]
    words += ["--output", str(tmp_path / "found.json")]
    fp32, plain, calibrated = benchmark.main(words)["resnet"]
    assert plain.skipped == [4, 4]
    assert calibrated.skipped == fp32.skipped == [0, 0]
    assert calibrated.loss == pytest.approx(fp32.loss, rel=1e-2)
    monkeypatch.setattr(benchmark, "emulated", None)
    assert benchmark.main(words)["resnet"][2] == calibrated
    assert "resnet | fp16 as on a GPU, calibrated |" in (tmp_path / "found.md").read_text()


def test_a_single_seed_is_refused(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--seeds", "1"])
    assert "a spread needs at least 2" in capsys.readouterr().err

"""The benchmark of loss curves: its distances are in spreads of autocast's seeds, and it sees a training that fails."""

import dataclasses
import importlib
import json

import pytest

from examples.demo.variants import VARIANTS

STEPS = 12
# Three seeds whose curves are parallel lines, one apart: at every step the mean is 2 and the sample deviation 1.
LINES = [[level - 0.01 * step for step in range(STEPS)] for level in (1.0, 2.0, 3.0)]


@pytest.fixture
def benchmark():
    return importlib.import_module("loss_curves")


def moved(by):
    return [[loss + by for loss in line] for line in LINES]


@pytest.mark.parametrize(("by", "within"), [(0.0, 1), (0.9, 1), (-1.1, 0), (5.0, 0)])
def test_distances_are_in_spreads(benchmark, by, within):
    found = benchmark.course(moved(by), LINES)
    assert found.within == within
    assert [found.median, found.largest, found.paired] == pytest.approx([abs(by)] * 3)


def test_one_seed_far_away_shows_seed_by_seed(benchmark):
    mine = [LINES[0], LINES[1], [loss + 2.7 for loss in LINES[2]]]
    found = benchmark.course(mine, LINES)
    assert found.largest == pytest.approx(0.9)
    assert found.paired == pytest.approx(2.7)


def test_a_departure_late_in_training_is_seen(benchmark):
    mine = [[*line[:-1], line[-1] + 100] for line in LINES]
    found = benchmark.course(mine, LINES)
    assert found.median < 1e-6 < 9 < found.largest
    assert found.within == 2 / 3  # of three running means


def test_running_means(benchmark):
    assert benchmark.smooth([1, 2, 3, 6], 3) == [2, 11 / 3]


def test_chance_is_students_distribution(benchmark):
    # |difference of means| <= deviation is |t| <= sqrt(n / 2), for which 2 degrees of freedom give |t| / sqrt(2 + t^2).
    assert benchmark.chance(3) == pytest.approx((1.5 / 3.5) ** 0.5, abs=0.005)
    assert benchmark.chance(3) < benchmark.chance(10) < 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_course(benchmark, bad):
    mine = [[*line] for line in LINES]
    mine[1][3] = bad
    with pytest.raises(ValueError, match="infinite or NaN"):
        benchmark.course(mine, LINES)


@pytest.mark.slow
def test_every_seed_and_variant_is_trained_and_printed(benchmark, tmp_path, capsys):
    path = tmp_path / "curves.json"
    words = ["--quick", "--models", "cnn", "--seeds", "2", "--steps", "10", "--threads", "1"]
    found = benchmark.main([*words, "--json", str(path)])["cnn"]
    assert list(found) == ["fp32", "autocast bf16", "amp_graph bf16", "amp_graph bf16 fast"]
    assert all(len(curve) == 10 for curves in found.values() for curve in curves)
    assert found["fp32"][0] != found["fp32"][1]
    assert json.loads(path.read_text())["results"]["cnn"] == found
    assert capsys.readouterr().out.count("| cnn |") == 3


@pytest.mark.slow
def test_a_training_whose_gradients_vanish_is_seen(benchmark, monkeypatch):
    made = benchmark.chosen

    def faint(*args):
        task, phase = made(*args)
        return dataclasses.replace(task, weight=2.0**-40), phase

    monkeypatch.setattr(benchmark, "chosen", faint)
    autocast, ours = VARIANTS["bf16"][1:3]
    variants = [autocast, ours, dataclasses.replace(ours, name="unscaled", policy="fp16")]
    found = benchmark.trained("gpt", variants, [0, 1], 16, True)
    right, broken = (benchmark.course(found[name], found[autocast.name]) for name in (ours.name, "unscaled"))
    assert right.largest < 1 < broken.largest


@pytest.mark.parametrize("words", [["--seeds", "1"], ["--steps", "9"]])
def test_too_little_for_a_spread_is_refused(benchmark, words, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(words)
    assert "a spread needs at least 2 seeds, a running mean 10 steps" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["resnet50", "gpt768"])
def test_the_larger_models_are_what_they_say(benchmark, name):
    made, phase = benchmark.chosen(name, 300)
    assert phase.steps == 300
    parameters = sum(p.numel() for p in made.build().parameters())
    assert {"resnet50": 25_000_000, "gpt768": 28_000_000}[name] < parameters < 30_000_000

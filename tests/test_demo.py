"""The demo runs end to end, its table and files are there, and every variant learns."""

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from examples.demo import progress, tasks, underflow
from examples.demo.run import WITHOUT_BF16, main
from examples.demo.tasks import task

ROOT = Path(__file__).parents[1]

ROWS = {
    "bf16": ["fp32", "autocast bf16", "amp_graph bf16", "amp_graph bf16 fast", "amp_graph, no policy"],
    "fp16": ["fp32", "autocast fp16", "amp_graph fp16"],
}


def run(folder, *models):
    assert main(["--quick", "--models", ",".join(models), "--output", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text())["models"]


def check(found, folder, name):
    for kind, rows in found.items():
        assert [row["variant"] for row in rows] == ROWS[kind]
        for row in rows:
            figures = (*row["losses"], row["loss"], row["held_out_loss"], *row["speed"])
            assert all(map(math.isfinite, figures))
            assert row["speed"][1] <= row["speed"][0] <= row["speed"][2]
            assert len(row["losses"]) == row["steps"]
            if kind == "bf16":
                assert fmean(row["losses"][-3:]) < fmean(row["losses"][:3])
            lowered = row["variant"] not in ("fp32", "amp_graph, no policy")
            assert bool(row["casts"]) == lowered or row["variant"] == "amp_graph, no policy"
            assert row["saved_mb"] > 0
            if row["variant"].startswith("amp_graph ") and lowered:
                assert row["operations"]["low"] > 0
                assert row["saved_mb"] < rows[0]["saved_mb"]
    for kind in ("bf16", "bf16_fast", "fp16"):
        short = "f16[" if kind == "fp16" else "bf16["
        assert short in (folder / f"{name}_{kind}_graph.txt").read_text()
        assert (folder / f"{name}_{kind}_report.html").stat().st_size > 1000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_demo(name, tmp_path, capsys):
    check(run(tmp_path, name)[name], tmp_path, name)
    shown = capsys.readouterr().out
    assert "amp_graph bf16 fast" in shown
    assert "which operation ran in which precision, and why" in shown
    assert "…" not in shown  # no column was cut
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "linear" in (tmp_path / "results.txt").read_text()


@pytest.mark.slow
def test_demo_with_transformers(tmp_path):
    pytest.importorskip("transformers")
    check(run(tmp_path, "hf")["hf"], tmp_path, "hf")


def test_without_loss_scale_nothing_is_learnt_and_with_it_as_much_as_in_fp32(tmp_path, capsys):
    assert main(["--quick", "--models", "underflow", "--output", str(tmp_path)]) == 0
    fp32, *unscaled, scaled = json.loads((tmp_path / "results.json").read_text())["underflow"]
    assert fp32["zeros"] == 0
    for one in unscaled:  # autocast is no better off than amp_graph
        assert one["zeros"] == one["values"] == fp32["values"]
        assert abs(one["held_out_loss"] - math.log(10)) < 0.02
        assert abs(one["loss"] - math.log(10)) < 0.05
    assert scaled["zeros"] < scaled["values"] / 1000
    assert fp32["held_out_loss"] < 1 < math.log(10)
    assert abs(scaled["held_out_loss"] - fp32["held_out_loss"]) < 0.02 * fp32["held_out_loss"]
    assert max(map(int, fp32["exponents"])) < underflow.SMALLEST + 1 < max(map(int, scaled["exponents"]))
    assert "11,722 of 11,722 (100.00%)" in capsys.readouterr().out
    assert (tmp_path / "underflow.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "losses.png").exists()


def test_demo_names_what_is_missing(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
    assert main(["--quick", "--output", str(tmp_path)]) == 1
    assert "scikit-learn is not installed\n  fix:   pip install 'amp-graph[demo]'" in capsys.readouterr().err


def test_demo_refuses_unknown_models(tmp_path, capsys):
    assert main(["--models", "cnn,bert", "--output", str(tmp_path)]) == 1
    assert "unknown model bert\n  legal: underflow, cnn, gpt, hf" in capsys.readouterr().err


def test_without_bf16_arithmetic_the_demo_says_so_and_no_policy_stays_in_fp32(tmp_path):
    given = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    words = ["--quick", "--steps", "4", "--models", "cnn,underflow", "--output", str(tmp_path)]
    command = [sys.executable, "-m", "examples.demo", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=given, timeout=300)
    first, said = done.stdout.split("\n", 1)
    assert first.startswith("amp_graph demo: torch ")
    assert said.startswith(WITHOUT_BF16)
    assert said.index("underflow: narrow stack") < said.index("cnn: ResNet on digits")
    for title in ("underflow", "cnn bf16", "cnn fp16"):
        assert f"{title}: step 1 of " in done.stderr  # where no terminal is, too
    *_, autocast, _, _, default = json.loads((tmp_path / "results.json").read_text())["models"]["cnn"]["bf16"]
    assert (default["variant"], default["casts"]) == ("amp_graph, no policy", 0)
    assert autocast["casts"]


def test_batches_are_smaller_without_bf16_arithmetic(monkeypatch):
    batches = []
    for has in (True, False):
        monkeypatch.setattr(tasks, "multiplies_bf16", lambda has=has: has)
        batches.append([phase.batch for phase in task("cnn").phases])
        assert sum(p.seconds for n in ("cnn", "gpt") for p in task(n).phases) <= 60
    assert batches == [[32, 4], [16, 4]]


def test_a_line_of_progress_every_few_seconds(monkeypatch, capsys):
    now = itertools.count(step=4.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.steps("cnn", 6) as advance:
        for _ in range(6):
            advance()
    assert capsys.readouterr().err.splitlines() == [f"cnn: step {n} of 6, {4 * n} s" for n in (1, 4, 6)]

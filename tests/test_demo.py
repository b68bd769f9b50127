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
import torch

import amp_graph
from examples.demo import interleaved_training, progress, tasks, underflow
from examples.demo.data import SYMBOLS, Digits, SourceText
from examples.demo.measure import casts_and_saved
from examples.demo.models import narrow_stack
from examples.demo.run import WITHOUT_BF16, main
from examples.demo.tasks import task
from examples.demo.variants import VARIANTS

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
    found = run(tmp_path, name)
    check(found[name], tmp_path, name)
    shown = capsys.readouterr().out
    assert "amp_graph bf16 fast" in shown
    assert "which operation ran in which precision, and why" in shown
    assert "…" not in shown  # no column was cut
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "linear" in (tmp_path / "results.txt").read_text()


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
    said = capsys.readouterr().err.splitlines()
    assert said == [f"cnn: step {n} of 6, {4 * n} s" for n in (1, 4, 6)]


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


def test_what_underflows_is_the_faint_loss(monkeypatch):
    monkeypatch.setattr(underflow, "WEIGHT", 1.0)  # the control: unscaled fp16 learns where nothing underflows
    fp32, *low = underflow.underflow(underflow.phase(steps=40), lambda: None)
    assert len(fp32.losses) == 40
    assert fp32.loss == pytest.approx(fmean(fp32.losses[-4:])), "of the last tenth"
    for one in low:
        assert one.zeros < one.values / 100
        assert abs(one.held_out_loss - fp32.held_out_loss) < 0.02 * fp32.held_out_loss


def test_no_gradient_of_the_faint_loss_reaches_fp16():
    logits = torch.tensor([[0.0, 100.0]] * underflow.BATCH, requires_grad=True)  # wrong, and sure of it
    loss = torch.nn.functional.cross_entropy(logits, torch.zeros(underflow.BATCH, dtype=torch.long))
    (underflow.WEIGHT * loss).backward()
    assert logits.grad.abs().max() == 2.0 ** (underflow.SMALLEST - 1)
    assert not logits.grad.half().any()


def test_train_step_scales_the_faint_loss_too():
    digits = Digits.load()

    def losses(loss_scale):
        torch.manual_seed(1)
        model = narrow_stack()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-8 * underflow.WEIGHT, fused=True)
        faint = lambda out, y: underflow.WEIGHT * torch.nn.functional.cross_entropy(out, y)  # noqa: E731
        step = amp_graph.TrainStep(model, faint, optimizer, "fp16", loss_scale=loss_scale)
        return [float(step(*digits.batch(i, underflow.BATCH))) / underflow.WEIGHT for i in range(40)]

    by_hand = underflow.underflow(underflow.phase(steps=40), lambda: None)[-1].losses
    assert losses("dynamic") == pytest.approx(by_hand, rel=1e-3)
    assert fmean(by_hand[-10:]) < 1.5
    assert abs(fmean(losses(None)[-10:]) - math.log(10)) < 0.05


def test_demo_names_what_is_missing(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else found(name))
    assert main(["--quick", "--output", str(tmp_path)]) == 1
    assert "scikit-learn is not installed\n  fix:   pip install 'amp-graph[demo]'" in capsys.readouterr().err


def test_demo_refuses_unknown_models(tmp_path, capsys):
    assert main(["--models", "cnn,bert", "--output", str(tmp_path)]) == 1
    assert "unknown model bert\n  legal: underflow, cnn, gpt, hf" in capsys.readouterr().err


def test_data_is_the_same_every_time():
    digits, text = Digits.load(), SourceText.load(16, 120_000)
    for data in (digits, text):
        assert torch.equal(data.batch(3, 4)[0], data.batch(3, 4)[0])
        assert not torch.equal(data.batch(3, 4)[0], data.batch(4, 4)[0])
    inputs, targets = text.batch(0, 2)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(text.ids.max()) < len(SYMBOLS)


def test_counting_casts_does_not_move_what_is_held_out(monkeypatch):
    chosen = task("cnn", quick=True, steps=2)  # its batch norms learn from every forward in training

    def held_out():
        return [
            one.held_out_loss
            for one in interleaved_training.race(chosen, chosen.phases[0], lambda: None, 0, VARIANTS["bf16"][:2])[1]
        ]

    counted = held_out()
    monkeypatch.setattr(interleaved_training, "casts_and_saved", lambda model, forward: (0, 0.0))
    assert held_out() == counted


def test_casts_are_counted_in_forward_and_backward():
    model = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    casts, saved = casts_and_saved(model, forward)
    # Input, weight, bias and the result; back, the gradients of all but the input.
    assert casts == 4 + 3
    assert saved == (8 + 16) * 2 / 1e6 or saved == 8 * 2 / 1e6

"""What the benchmark of speed computes, on models small enough to count by hand."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.measure import CastCounter

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HIDDEN, OUT, BATCH = 8, 2, 3


def two_layers(device="cpu"):
    """4 -> 8 -> 2, a batch of 3, the mean square in fp32 as loss."""
    from model_case import Case

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))
    return Case(model, (torch.randn(BATCH, 4),), lambda m, x: m(x).float().square().mean(), lambda m, x: m(x))


@pytest.fixture
def prepared(monkeypatch):
    """Prepare a variant of ``two_layers`` by its name."""
    import variants

    monkeypatch.setattr(variants, "case", lambda name, scale, device: two_layers())

    def make(name, training=True):
        setup = variants.Setup()
        (one,) = (v for v in variants.variants(setup, images=False, training=training) if v.name == name)
        return (variants.training_step if training else variants.inference_call)("two_layers", 1.0, one, setup)

    return make


# -- casts ------------------------------------------------------------------------------------------------

PARAMETERS = [4 * HIDDEN, HIDDEN, HIDDEN * OUT, OUT]


DOWN, LOSS = [BATCH * 4, *PARAMETERS], [BATCH * OUT]


@pytest.mark.parametrize(
    ("name", "training", "elements"),
    [
        # Down: the batch, four parameters. Up: the output, for the square. And backward, but for the batch.
        ("autocast", True, [*DOWN, *LOSS, *LOSS, *PARAMETERS]),
        ("autocast", False, DOWN),  # inside of linears
        ("amp_graph", False, [BATCH * 4, *LOSS]),  # weights are cast by now
        ("fp32", True, []),
        ("pure bf16", True, [*LOSS, *LOSS]),  # the loss alone is fp32
    ],
)
def test_casts_of_a_call_by_hand(prepared, name, training, elements):
    from step_costs import Casts, casts_of

    made = prepared(name, training=training)
    if name == "amp_graph":
        made.run()
    assert casts_of(made.run) == Casts(len(elements), sum(elements) * (4 + 2))


def test_casts_are_those_that_the_test_suite_counts(prepared):
    from step_costs import casts_of

    for name in ("autocast", "amp_graph", "TrainStep"):
        made = prepared(name)
        made.run()
        ours = casts_of(made.run)
        with CastCounter(made.case.model) as others:
            made.run()
        assert (ours.count, ours.bytes) == (others.total, others.bytes), name


def test_copies_of_lists_and_of_integers():
    from step_costs import Casts, casts_of

    low, wide = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(5)], [torch.zeros(3), torch.zeros(5)]

    def run():
        torch._foreach_copy_(low, wide)  # one of two is a cast
        torch.zeros(7).copy_(torch.zeros(7, dtype=torch.bfloat16))
        torch.zeros(9).long()
        torch.zeros(9).to(torch.float32, copy=True)

    assert casts_of(run) == Casts(2, (3 + 7) * (4 + 2))


# -- memory -----------------------------------------------------------------------------------------------


def test_saved_bytes_of_each_variant(prepared):
    from step_costs import Saved, saved_by

    # The hidden layer, once for relu and the product that reads it, and what is squared. The batch exists anyway.
    assert saved_by(prepared("fp32"), False) == Saved(4 * BATCH * (HIDDEN + OUT), 0, 4 * BATCH * (HIDDEN + OUT))
    # In bf16 also the batch's copy, and the second layer's weight; what is squared is fp32.
    activations, weight = 2 * BATCH * (4 + HIDDEN) + 4 * BATCH * OUT, 2 * HIDDEN * OUT
    assert saved_by(prepared("autocast"), False) == Saved(activations, weight, activations + weight)
    assert saved_by(prepared("amp_graph"), False) == Saved(activations, weight, activations + weight)


def test_saved_bytes_of_a_whole_step_are_those_of_its_parts(prepared):
    from step_costs import Saved, saved_by

    step = prepared("TrainStep")
    step.run()
    activations, copies = 2 * BATCH * (4 + HIDDEN) + 4 * BATCH * OUT, 2 * sum(PARAMETERS)
    assert saved_by(step, False) == Saved(activations, copies, activations + copies)
    assert saved_by(prepared("amp_graph"), False).activations == activations
    assert saved_by(step, True) is None


def test_a_view_is_no_second_activation():
    from step_costs import saved_by_autograd
    from variants import Prepared

    made = two_layers()

    def run():
        h = made.model(*made.batch)
        (h @ h.t()).sum().backward()

    assert saved_by_autograd(Prepared(made, made.batch, run), False).activations == 4 * BATCH * (HIDDEN + OUT)


def test_what_is_held_between_steps(prepared):
    from step_costs import held_by

    made = prepared("fp32")
    made.run()
    assert held_by(made) == 3 * 4 * sum(PARAMETERS) + 4 * len(PARAMETERS)  # two moments, and the count of steps
    step = prepared("TrainStep")
    step.run()
    assert held_by(step) == held_by(made) + 2 * sum(PARAMETERS)


def test_the_peak_counts_what_is_held_at_once():
    from devices import Device

    def run():
        a = torch.empty(1000)
        b = torch.empty(2000)
        del a
        torch.empty(1500)
        del b

    assert Device().peak(run) == 4 * (2000 + 1500)


# -- limits, ratios ---------------------------------------------------------------------------------------


def test_flops_are_those_of_the_products():
    from limits import flops_of

    layer = 2 * 32 * 256 * 256
    assert flops_of("mlp", 1.0, training=False) == 3 * layer
    assert flops_of("mlp", 1.0, training=True) == (3 + 3 + 2) * layer  # nobody asks for the batch's gradient
    rows, recurrent, head = 32 * 64, 2 * (512 + 512) * 4 * 512, 2 * 512 * 8192
    assert flops_of("lstm", 1.0, training=False) == rows * (2 * recurrent + head)


def test_the_limit_adds_products_and_bytes(monkeypatch):
    import limits

    found = limits.limit_of("mlp", 1.0, True, limits.Rates({"fp32": 1e9, "bf16": 2e9}, 4e9), saved=10**6)
    parameters = 3 * (256 * 256 + 256)
    assert found.ms == pytest.approx(1e3 * (found.flops / 2e9 + (28 * parameters + 2 * 10**6) / 4e9), rel=1e-12)
    assert limits.limit_of("mlp", 1.0, False, limits.Rates({"fp32": 1e9}, 4e9), None).ms == found.flops * 3 / 8 / 1e6


def test_ratios_are_of_the_same_rounds_and_to_the_better_baseline():
    from measuring import better, ratio, timed
    from variants import Setup, variants

    every = variants(Setup(), images=True, training=True)
    seconds = {"autocast": [4.0, 4.0, 4.0], "autocast channels_last": [2.0, 3.0, 4.0], "fp32": [1.0, 1.0, 1.0]}
    assert better(False, every, seconds) == "autocast channels_last"
    assert better(True, every, seconds) is None
    assert ratio([1.0, 1.5, 4.0], seconds["autocast channels_last"])["ratio"] == 2.0
    found = timed([1.0, 1.5, 4.0], 500.0, seconds["autocast"], None)
    assert (found["ms"], found["over_limit"], found["against_same_mode"]) == (1500.0, 3.0, None)


def test_a_variant_that_fails_is_a_row_that_says_so(monkeypatch):
    import measuring
    from devices import Device
    from limits import Rates
    from tables import one_line, speed_table
    from variants import Setup, Variant

    usual = measuring.inference_call

    def failing(name, scale, variant, setup):
        if variant.policy:
            raise RuntimeError("no kernel\nand more")
        return usual(name, scale, variant, setup)

    monkeypatch.setattr(measuring, "inference_call", failing)
    every = [Variant("autocast", autocast=True), Variant("amp_graph", "bf16")]
    job = measuring.Job("mlp", 1.0, False, Setup(), 2)
    found = measuring.measured(job, every, Device(), Rates({"bf16": 1e9}, 1e9))
    assert found["variants"]["amp_graph"] == {"error": "RuntimeError: no kernel"}
    assert found["variants"]["autocast"]["against_same_mode"]["ratio"] == 1.0
    assert one_line("inference", "mlp", found).endswith("amp_graph RuntimeError: no kernel")
    assert speed_table("inference", {"mlp": found})[-2].endswith("| fails |")

    found = measuring.measured(job, every[1:], Device(), Rates({"bf16": 1e9}, 1e9))
    assert found["baseline"] is None
    assert speed_table("inference", {"mlp": found})[-2] == "| mlp | fails | fails |"


def test_a_first_call_that_takes_too_long_is_given_up(prepared, monkeypatch):
    import measuring
    from devices import Device

    made = prepared("fp32")
    monkeypatch.setattr(made, "run", lambda: time.sleep(60))
    with pytest.raises(measuring.OutOfPatience, match=r"took more than 0\.05 s"):
        measuring._first_call(made, Device(), 0.05)
    monkeypatch.undo()
    assert measuring._first_call(made, Device(), 60.0)["first_call_s"] < 60
    time.sleep(0.1)  # and no alarm is left


def test_what_is_kept_compiled_says_nothing_of_first_calls(prepared, tmp_path, monkeypatch):
    import measuring
    import speed
    from devices import Device
    from tables import _costs

    from amp_graph.passes.native.jit_compiler import folder

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with speed.compiled_anew(tmp_path / "kept"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kept")
        assert folder() == tmp_path / "kept" / "amp_graph"
        assert not torch._inductor.config.force_disable_caches
    with speed.compiled_anew():
        assert torch._inductor.config.force_disable_caches
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ

    found = measuring._first_call(prepared("fp32"), Device(), 60.0, anew=False)
    assert found["first_call_s"] is None
    row = {"ms": 1.0, "over_limit": 1.0, "casts": None, "saved": None, "peak_bytes": None, "held_bytes": None} | found
    assert _costs(row)[-2:] == ["", ""]


# -- the choice of variants -------------------------------------------------------------------------------


def names(patterns="", compiled=False, **given):
    from variants import Setup, chosen, variants

    every = variants(Setup(), images=given.get("images", False), training=given.get("training", True))
    return [v.name for v in chosen(every, patterns, compiled)]


def test_eager_variants_are_the_default_and_baselines_come_along():
    alone = ["fp32", "pure bf16"]  # not through Inductor
    ours = ["amp_graph", "amp_graph fast", *alone[2:], "TrainStep", "TrainStep fast"]
    eager = ["fp32", "autocast", "pure bf16", *ours]
    assert names() == eager
    assert names(compiled=True)[: len(eager)] == eager
    assert names(compiled=True)[len(eager) :] == [f"{n} + Inductor" for n in eager if n not in alone]
    assert names("TrainStep") == ["autocast", "TrainStep"]
    assert names("*frozen*", training=False) == ["autocast", "autocast + Inductor", "autocast frozen + Inductor"]
    assert "autocast frozen + Inductor" not in names(compiled=True)
    assert names("TrainStep + *", images=True) == [
        "autocast",
        "autocast channels_last",
        "autocast + Inductor",
        "autocast channels_last + Inductor",
        "TrainStep + Inductor",
    ]
    assert "TrainStep" not in names(training=False)
    with pytest.raises(SystemExit, match=r"matches nothing\n  legal:"):
        names("apex")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    import speed

    with pytest.raises(SystemExit, match=r"sees no CUDA device\n  legal: cpu"):
        speed.main(["--device", "cuda"])
    with pytest.raises(SystemExit, match="only with a GPU"):
        speed.main(["--cuda-graphs"])


def test_one_model_from_beginning_to_end(tmp_path, capsys):
    import speed

    words = ["--models", "mlp", "--rounds", "2", "--output", str(tmp_path / "s")]
    speed.main([*words, "--variants", "amp_graph,TrainStep"])
    (run,) = json.loads((tmp_path / "s.json").read_text())["runs"]
    rows = run["results"]["training"]["mlp"]["variants"]
    assert list(rows) == ["autocast", "amp_graph", "TrainStep"]
    assert rows["autocast"]["against_autocast"]["ratio"] == 1.0
    assert rows["TrainStep"]["ms"] > 0
    assert "| mlp | TrainStep |" in (tmp_path / "s.md").read_text()
    assert "training mlp:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="leaves out: TrainStep;"):
        speed.main([*words, "--variants", "amp_graph"])


@pytest.mark.multiplied
def test_packed_weights_are_counted_by_their_elements(prepared, monkeypatch):
    from step_costs import casts_of, held_by

    from amp_graph.passes.backends.cpu.inference import prepack_weights
    from amp_graph.passes.native import gemm_thresholds

    monkeypatch.setattr(gemm_thresholds, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(gemm_thresholds, "FEWEST_OUTPUTS", 2)
    monkeypatch.setattr(prepack_weights, "panels_are_profitable", lambda *sizes: False)  # whose panels are whole
    made = prepared("amp_graph", training=False)
    made.run()
    assert any(t.layout is not torch.strided for t in made.weight_copies())
    assert casts_of(made.run).count == 2  # the batch, and the output: no weight
    assert held_by(made) == 4 * sum(PARAMETERS) + 2 * sum(PARAMETERS)


def test_the_check_for_a_gpu_names_parts_and_models_that_there_are():
    import models

    script = (BENCHMARKS / "gpu" / "check.sh").read_text()
    named = {m for words in re.findall(r"\$\{MODELS:-([^}]*)\}", script) for m in re.split(r"[ ,]", words)}
    assert named <= set(models.MODELS | models.MORE)
    assert {"gpt2_medium", "resnet50"} <= named


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_says_where_there_is_none():
    script = BENCHMARKS / "gpu" / "check.sh"
    ran = subprocess.run([script], env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "sees no GPU" in ran.stderr
    assert "fix:" in ran.stderr


def test_a_row_says_how_long_its_kernels_ran():
    from tables import _kernels

    row = {"ms": 4.0, "kernels": {"count": 12, "ms": 3.0}}
    assert _kernels(row, on_gpu=True) == ["12", "3.0", "0.75"]
    assert _kernels({"ms": 4.0}, on_gpu=True) == ["", "", ""]
    assert _kernels(row, on_gpu=False) == []


def test_an_update_has_the_micro_batches_of_its_case(monkeypatch):
    from variants import _with_update

    model = nn.Linear(2, 1)
    counted = []
    run = _with_update(
        lambda: counted.append(1) or model(torch.ones(1, 2)).sum(), torch.optim.SGD(model.parameters(), 1.0), None, 4
    )
    before = model.weight.detach().clone()
    run()
    assert len(counted) == 4
    assert torch.equal(model.weight, before - 1)  # the mean of four equal gradients

"""C that a model will want is compiled while it is captured: what it wants, once, and nobody compiles it beside."""

import os
import threading
import time

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture import precompile_kernels
from amp_graph.capture.precompile_kernels import compile_ahead as begin
from amp_graph.passes.native import gemm_thresholds, jit_compiler, kernel_table
from amp_graph.passes.native.jit_compiler import CompilerError

BF16 = torch.bfloat16
KERNELS = {
    "linears": "panel_gemm",
    "attention": "attention",
    "attention's backward": "attention_backward",
    "batch norms": "batch_norm",
    "cross entropy": "cross_entropy",
    "depthwise": "depthwise_conv",
    "amx products": "amx_gemm",
}
TRANSFORMER = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
MODELS = {
    "mlp": (nn.Linear(8, 8), {"linears"}),
    "transformer": (TRANSFORMER, {"linears", "attention", "attention's backward"}),
    "wide": (nn.Linear(512, 512), {"linears", "amx products"}),
    "large": (nn.Linear(8, 1 << 15), {"linears", "cross entropy", "amx products"}),
    "language model": (
        nn.Sequential(TRANSFORMER, nn.Linear(8, 5000)),
        {*KERNELS} - {"batch norms", "depthwise"},
    ),
    "convolutions": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), {"batch norms"}),
    "channels apart": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 7, groups=8)), {"depthwise"}),
    "sequences": (nn.Conv1d(8, 8, 31, groups=8), {"depthwise"}),
    "on another device": (nn.Linear(8, 8, device="meta"), set()),
    "nothing": (nn.ReLU(), set()),
}


@pytest.fixture
def loaded(monkeypatch):
    """What is loaded, in order, in a process that has begun nothing."""
    found = []
    monkeypatch.setattr(precompile_kernels, "_begun", set())
    monkeypatch.setattr(precompile_kernels, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(gemm_thresholds, "cpu_has_amx", lambda: True)
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(kernel_table._loaders, kernel, lambda low, name=name: found.append(name))
    return found


def joined(threads):
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_wants_is_compiled_once(loaded, name):
    model, wanted = MODELS[name]
    joined(begin(model, BF16, trains=True))
    assert set(loaded) == wanted
    assert begin(model, BF16, trains=True) == []


@pytest.mark.parametrize("name", MODELS)
def test_what_evaluation_does_not_call_waits_for_training(loaded, name):
    model, wanted = MODELS[name]
    joined(begin(model, BF16, trains=False))
    assert set(loaded) == wanted & {"linears", "attention"}
    joined(begin(model, BF16, trains=True))
    assert sorted(loaded) == sorted(wanted)


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_converted_for_evaluation_compiles_the_rest_when_it_is_captured_with_gradients(loaded, trains):
    model = amp_graph.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval(), "bf16")
    with torch.set_grad_enabled(trains):
        model(torch.randn(1, 3, 8, 8))
    joined([thread for thread in threading.enumerate() if thread.name == precompile_kernels.THREAD])
    assert ("batch norms" in loaded) == trains


def test_fp16_has_no_products_of_ours(loaded):
    joined(begin(TRANSFORMER, torch.float16, trains=True))
    assert loaded == []


def test_what_cannot_be_compiled_is_said_where_it_is_wanted(loaded, monkeypatch):
    def fails(low):
        raise CompilerError("no compiler")

    for part in ("attention", "attention_backward"):
        monkeypatch.setitem(kernel_table._loaders, part, fails)
    joined(begin(TRANSFORMER, BF16, trains=True))  # an error in a thread would fail this test
    assert loaded == ["linears"]


@pytest.mark.parametrize("make", ["convert", "TrainStep"])
def test_it_begins_with_the_model(loaded, make):
    model = nn.Linear(8, 8)
    if make == "convert":
        amp_graph.convert(model, "bf16")
    else:
        amp_graph.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    joined([thread for thread in threading.enumerate() if thread.name == precompile_kernels.THREAD])
    assert loaded == ["linears"]


@pytest.mark.parametrize("options", [{"policy": "bf16-O0"}, {"policy": "bf16", "compile": "aot_eager"}])
def test_nothing_is_compiled_that_will_not_run(loaded, options):
    amp_graph.convert(nn.Linear(8, 8), **options)
    assert not precompile_kernels._begun


@pytest.mark.compiled
def test_who_wants_what_is_being_compiled_waits_for_it(monkeypatch, tmp_path):
    """The control: without the lock two threads compile at once."""
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }")
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path / "made"))
    plain, begun = jit_compiler._compile, []

    def slow(*args):
        begun.append(args)
        time.sleep(0.3)
        plain(*args)

    monkeypatch.setattr(jit_compiler, "_compile", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(jit_compiler.load(source).answer())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [42] * 3
    assert len(begun) == 1

    monkeypatch.setattr(jit_compiler, "_locks", {(source, ("-DOTHER",)): threading.Semaphore(3)})
    threads = [threading.Thread(target=jit_compiler.load, args=(source, ("-DOTHER",))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 4


@pytest.mark.compiled
def test_what_a_process_left_that_ended_while_it_compiled_is_removed(monkeypatch, tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }")
    monkeypatch.setenv(jit_compiler.FOLDER, str(tmp_path))
    key, unique = f"answer-{'0' * 24}", "a" * 32
    left, being_made = tmp_path / f"{key}.{unique}.part", tmp_path / f"{key}.{unique[::-1]}b.part"
    of_record, of_the_user = tmp_path / f".{key}.sha256.{unique}.part", tmp_path / "thesis.part"
    for part in (left, being_made, of_record, of_the_user):
        part.touch()
    for part in (left, of_record, of_the_user):
        os.utime(part, (1, 1))
    assert jit_compiler.load(source).answer() == 42
    assert {part.name for part in tmp_path.glob("*.part")} == {being_made.name, of_the_user.name}

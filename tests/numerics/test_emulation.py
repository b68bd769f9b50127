"""``emulate=cuda`` beside calibration, the locator, a training step and Inductor."""

import copy

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from tests.numerics.planted import MLP

POLICY = "fp16,emulate=cuda"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MLP("forward")


def test_an_overflow_is_found_calibrated_and_trained_without_a_gpu(model, tmp_path):
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    found = amp_graph.locate(model, (x, y), F.mse_loss, policy=POLICY)
    assert found.kind == "overflow"
    assert "600.0 * 400.0" in found.line
    path = tmp_path / "run.json"
    amp_graph.calibrate(model, [(x, y)], F.mse_loss).save(path)
    losses = {}
    for word in ("", f",calibration={path}"):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        step = amp_graph.TrainStep(trained, F.mse_loss, optimizer, policy=POLICY + word)
        losses[word] = [step(x, y) for _ in range(3)][-1]
        assert "an emulation of cuda on the CPU" in amp_graph.report(step).text()
    assert [torch.isfinite(loss).item() for loss in losses.values()] == [False, True]
    assert losses[f",calibration={path}"] < F.mse_loss(model(x), y)


def test_the_comparison_has_the_emulated_plan(model):
    batches = [(torch.randn(8, 16), torch.randn(8, 4))]
    worst = amp_graph.compare(model, batches, F.mse_loss, policy=POLICY).rows()[0]
    assert worst["layer"] == "plant"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # where Inductor is imported first
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compilers_round_where_the_graph_does(backend):
    made = []
    for compile in ("eager", backend):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        amp_graph.convert(model, POLICY, compile=compile)
        out = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
        amp_graph.GradScaler(init_scale=1024.0).scale(out.sum()).backward()
        made.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))

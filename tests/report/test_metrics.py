"""``metrics`` reads models, steps and scalers with one copy to the host, and says what it does not know."""

import pytest
import torch
from torch.nn import functional as F

import amp_graph
from amp_graph.errors import CaptureError


def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def test_a_loop_with_a_scaler():
    model = amp_graph.convert(net(), "fp16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), amp_graph.GradScaler()
    assert amp_graph.metrics(model, scaler) == {"casts": 0, "held_bytes": 0, "loss_scale": 2.0**16, "skipped_steps": 0}
    scaler.scale(model(torch.full((2, 8), 1e38)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    norm = torch.tensor(0.5)
    found = amp_graph.metrics(model, scaler, None, grad_norm=norm)
    casts = len(amp_graph.report(model).graphs[0].casts)
    assert found["casts"] == casts > 0
    assert (found["loss_scale"], found["skipped_steps"], found["grad_norm"]) == (2.0**15, 1, 0.5)
    assert {type(value) for value in found.values()} == {float}
    assert found["held_bytes"] == 0


def test_masters_are_held_and_models_are_added_up():
    models = [amp_graph.convert(net(), "bf16-O2") for _ in range(2)]
    elements = sum(p.numel() for p in models[0].parameters())
    assert amp_graph.metrics(models[0])["held_bytes"] == 4 * elements
    assert amp_graph.metrics(*models)["held_bytes"] == 8 * elements


def test_steps_optimizers_and_torchs_scaler():
    model = net()
    step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), "fp16")
    step(torch.randn(2, 8), torch.tensor([0, 1]))
    assert amp_graph.metrics(step).keys() == {
        *("casts", "held_bytes", "loss_scale", "skipped_steps", "skipped_of_last_100")
    }
    inner = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer = amp_graph.MixedPrecisionOptimizer(inner, dynamic_loss_scale=True)
    assert amp_graph.metrics(optimizer) == {"loss_scale": 2.0**16, "skipped_steps": 0}
    assert amp_graph.metrics(torch.amp.GradScaler("cpu")) == {"loss_scale": 2.0**16}
    assert amp_graph.metrics(torch.amp.GradScaler("cpu", enabled=False)) == {}
    assert amp_graph.metrics(amp_graph.LossScale(64.0)) == {"loss_scale": 64.0, "skipped_steps": 0}


@pytest.mark.parametrize("wrong", [net(), 3, "model"])
def test_what_has_no_metrics_is_named(wrong):
    with pytest.raises(CaptureError, match=rf"a {type(wrong).__name__} has none\n  legal: a converted model"):
        amp_graph.metrics(wrong)

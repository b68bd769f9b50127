"""Casts of many weights by one call, as on a GPU, here on the CPU: bit for bit what one call for each gives."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.weights import batch_weight_casts

TOGETHER = "bf16,skip=channels_last"
ALONE = "bf16,skip=channels_last|batch_weight_casts"


@pytest.fixture(autouse=True)
def _is_profitable(monkeypatch):
    monkeypatch.setattr(batch_weight_casts, "few_calls_are_profitable", lambda device: True)


class Net(nn.Module):
    """Convolutions and linears, and a region with gradients, if that is asked for."""

    def __init__(self, *, trains=False):
        super().__init__()
        torch.manual_seed(0)
        self.trains, self.conv = trains, nn.Conv2d(3, 8, 3)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(F.relu(self.conv(x)).mean((2, 3)))
        with torch.set_grad_enabled(self.trains):
            return self.last(F.gelu(x))


X = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def calls(model):
    return sum(" low_weights(" in line for g in amp_graph.report(model).graphs for line in g.text.splitlines())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_are_those_of_casts_alone(dtype, monkeypatch):
    """In graphs that are verified: the memory that the casts of a group write to is the group's own."""
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    together, alone = (amp_graph.convert(Net(), p.replace("bf16", dtype), strict=True) for p in (TOGETHER, ALONE))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(together(X), alone(X))
            for model in (together, alone):
                model.first.weight.mul_(1.5)
    assert (calls(together), calls(alone)) == (1, 0)
    casts = [c for c in amp_graph.report(together).graphs[0].casts if c.of == "weight"]
    assert {c.source for c in casts} >= {"conv.weight", "last.bias", "first.weight"}


@pytest.mark.parametrize(("grad", "trains"), [(True, False), (False, True)])
def test_a_graph_that_records_gradients_casts_each_weight_where_it_is_read(grad, trains):
    model = amp_graph.convert(Net(trains=trains), TOGETHER, strict=True)
    with torch.set_grad_enabled(grad):
        model(X)
    assert calls(model) == 0


def test_weights_on_several_devices_are_apart(monkeypatch):
    def elsewhere(node):
        found = value(node)
        first = node.op == "call_method" and "first" in str(node.args[0])
        return SimpleNamespace(dtype=found.dtype, device=torch.device("meta")) if first else found

    monkeypatch.setattr(batch_weight_casts, "LEAST", 2)
    monkeypatch.setattr(batch_weight_casts, "value", elsewhere)
    model = amp_graph.convert(Net(), TOGETHER, strict=True)
    with torch.no_grad():
        model(X)
    assert calls(model) == 2


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x):
        for w in self.w:
            w.mul_(0.5)
            x = x @ w
        return x


@torch.no_grad()
def test_what_the_graph_writes_is_cast_where_it_is_read():
    together, alone = (amp_graph.convert(Written(), policy) for policy in (TOGETHER, ALONE))
    assert all(torch.equal(together(torch.ones(2, 4)), alone(torch.ones(2, 4))) for _ in range(2))
    assert calls(together) == 0


def test_weights_are_cast_into_their_layout():
    weights = [torch.randn(8, 4, 3, 3), torch.randn(5, 7).t(), torch.randn(8, 4, 1, 1)]
    formats = (torch.channels_last, None, torch.channels_last)
    low = batch_weight_casts.low_weights(weights, torch.bfloat16, formats)
    assert low[0].is_contiguous(memory_format=torch.channels_last)
    assert low[1].stride() == weights[1].stride()
    assert all(torch.equal(a, w.bfloat16()) for a, w in zip(low, weights, strict=True))

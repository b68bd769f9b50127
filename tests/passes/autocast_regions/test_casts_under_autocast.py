"""The casts of torch.autocast in a captured graph are those that a dispatch mode counts in an eager call."""

import gc
import weakref

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.autocast_regions.casts_under_autocast import CastsUnderAutocast
from tests.layers import layers
from tests.measure_casts import CastCounter


class SharedWeight(nn.Module):
    """A weight that two layers read, which autocast casts once; its view, which it casts each time."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = torch.relu(self.a(x)) @ self.a.weight[:, :16] + self.c(x).sum()
        with torch.autocast("cpu", enabled=False):
            x = self.b(x.float())
        return self.c(self.b(torch.exp(x))).log_softmax(-1)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )


@layers(lambda: dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))
def Broken(self, x):
    """The second graph starts with values that autocast would have lowered, and has weights of its own."""
    x = self.a(x)
    torch._dynamo.graph_break()
    return self.b(torch.exp(x))


MODELS = {
    "shared weight": (SharedWeight, (4, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 4, 16)),
    "convolutions": (convolutions, (2, 3, 8, 8)),
}


def found(model, x):
    """Convert and call a model; return what its graphs are under autocast."""
    amp_graph.convert(model, "bf16")(x)
    told = amp_graph.report(model)
    return told, [graph.autocast for graph in told.graphs]


@pytest.mark.parametrize("name", MODELS)
def test_casts_are_those_of_an_eager_call(name):
    made, shape = MODELS[name]
    model, x = made(), torch.randn(shape, requires_grad=True) * 2  # of leaves, casts are kept
    with torch.autocast("cpu", torch.bfloat16), CastCounter(model) as casts:
        model(x)
    told, graphs = found(model, x)
    assert not any(one.why_not for one in graphs)
    assert sum(one.activations for one in graphs) == casts.forward_activation
    assert sum(one.weights for one in graphs) == len(casts.of("forward", "weight")) > 0
    assert f"torch.autocast: {graphs[0].all} a call" in told.text()


def test_each_graph_between_breaks_is_counted_from_the_fp32_values_it_gets():
    """An eager call hands on bf16, which the second linear need not cast: graphs hand on the dtypes of fp32."""
    model, x = Broken(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16), CastCounter(model) as casts:
        model(x)
    assert (casts.forward_activation, len(casts.of("forward", "weight"))) == (1, 4)
    told, graphs = found(model, x)
    assert graphs == [CastsUnderAutocast(1, 2)] * 2
    assert told.text().count("torch.autocast: 3 a call (1 of activations, 2 of weights)") == 2


def test_counting_changes_nothing():
    model, x = convolutions(), torch.randn(2, 3, 8, 8)
    amp_graph.convert(model, "bf16")(x)
    state = {name: (t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    with torch.autocast("cpu", torch.float16), CastCounter(model) as casts:  # the reader's own
        assert amp_graph.report(model).graphs[0].autocast == CastsUnderAutocast(1, 4)
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert not casts.total
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, state[name][0]) for name, t in model.state_dict().items())
    assert all(t._version == state[name][1] for name, t in model.state_dict(keep_vars=True).items())


def test_sizes_may_vary():
    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), "bf16")
    for count in (3, 5):
        model(torch.randn(count, 8))
    assert [graph.autocast for graph in amp_graph.report(model).graphs] == [CastsUnderAutocast(1, 4)] * 2


def test_they_are_counted_where_the_model_is_gone():
    model = amp_graph.convert(convolutions(), "bf16")
    model(torch.randn(2, 3, 8, 8))
    told, there = amp_graph.report(model), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert there() is None
    assert [graph.autocast for graph in told.graphs] == [CastsUnderAutocast(1, 4)]


def test_what_cannot_be_counted_says_why():
    @layers(lambda: dict(a=nn.Linear(8, 8)))
    def Selects(self, x):
        x = self.a(x)
        return self.a(x[x.sum(1) > 0]).sum()

    told, (graph,) = found(Selects(), torch.randn(4, 8))
    assert graph.why_not == "its sizes depend on data"
    assert "torch.autocast: not counted: its sizes depend on data" in told.text()

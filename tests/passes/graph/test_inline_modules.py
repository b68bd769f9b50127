"""A call of a module becomes its functions, and computes the same; calls that cannot become that stay."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Tracer

import amp_graph
from amp_graph.passes.graph.propagate_fake_values import inline_modules
from tests.layers import forward_of, layers

X = torch.linspace(-1, 1, 16).view(4, 4)


@layers(lambda: dict(weight=nn.Parameter(torch.eye(4) * 1.5), calls=nn.Buffer(torch.zeros(()))))
def Scaled(self, x, factor=2.0, *, shift=1.0):
    """A module with defaults, one of which is by name alone; ``calls`` counts in a buffer."""
    self.calls.add_(1)
    return x @ self.weight * factor + shift


@forward_of(Scaled)
def Pair(self, x):
    return Scaled.forward(self, x), x - 1


@forward_of(nn.Module)
def Any(self, *given):
    return given[0] - given[1]


@forward_of(nn.Module)
def Named(self, **given):
    return given["a"] - given["b"]


def hooked():
    model = Scaled()
    model.register_forward_hook(lambda module, given, out: out * 3)
    return model


INLINED = {
    "its defaults": (Scaled, lambda part, x: part(x)),
    "by position": (Scaled, lambda part, x: part(x, 3.0)),
    "by name": (Scaled, lambda part, x: part(shift=0.5, x=x)),
    "what it is given": (nn.Identity, lambda part, x: part(x).relu()),
    "modules inside": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()), lambda part, x: part(x)),
}
KEPT = {
    "several results": (Pair, lambda part, x: part(x)[0] * part(x)[1]),
    "any number of arguments": (Any, lambda part, x: part(x, 2 * x)),
    "any names": (Named, lambda part, x: part(a=x, b=2 * x)),
    "statistics": (lambda: nn.BatchNorm1d(4), lambda part, x: part(part(x) + 1)),
    "an average over all calls": (lambda: nn.BatchNorm1d(4, momentum=None), lambda part, x: part(part(x) + 1)),
    "a hook": (hooked, lambda part, x: part(x)),
}


@layers(lambda kind, call: dict(part=kind(), call=call), seed=0)
def Whole(self, x):
    return self.call(self.part, x)


class OneLeaf(Tracer):
    """Leaves the call of ``part`` in the graph, as it does of modules of torch.nn."""

    def is_leaf_module(self, m, module_qualified_name):
        return module_qualified_name == "part"


def traced(kind, call):
    model = Whole(kind, call)
    return GraphModule(model, OneLeaf().trace(model))


@pytest.mark.parametrize("name", INLINED | KEPT)
def test_it_computes_the_same_and_writes_as_often(name):
    plain = traced(*(INLINED | KEPT)[name])
    ours = copy.deepcopy(plain)
    before = copy.deepcopy(ours.state_dict())
    ours = inline_modules(ours)
    assert same(ours.state_dict(), before)
    assert plain.graph.find_nodes(op="call_module")
    assert bool(ours.graph.find_nodes(op="call_module")) == (name in KEPT)
    assert all(torch.equal(ours(x), plain(x)) for x in (X, X * 2))
    assert same(ours.state_dict(), plain.state_dict())


def same(one, two):
    return all(torch.equal(one[key], two[key]) for key in one.keys() | two.keys())


@pytest.mark.parametrize("name", [n for n in INLINED | KEPT if n != "an average over all calls"])
def test_a_rewritten_trace_computes_what_the_model_does(name):
    plain = traced(*(INLINED | KEPT)[name])
    ours = amp_graph.rewrite(copy.deepcopy(plain), "bf16", (X,))
    for x in (X, X * 2):
        torch.testing.assert_close(ours(x), plain(x), atol=0.02, rtol=0.02)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, atol=0.02, rtol=0.02)

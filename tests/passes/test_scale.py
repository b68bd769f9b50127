"""The work of a rewrite grows with the graph and no faster: counted here, timed in benchmarks."""

import pytest
import torch
from torch import nn

from amp_graph.passes.casts import insert_casts
from amp_graph.passes.graph import identify_ops
from amp_graph.passes.graph.fake_values import adopt_values
from amp_graph.passes.graph.grad_regions import mark_regions
from amp_graph.passes.graph.propagate_fake_values import record_values
from amp_graph.passes.manager import run_passes
from tests.layers import layers
from tests.passes.graphs import standard_passes


@layers(lambda: dict(norm=nn.LayerNorm(4), a=nn.Linear(4, 8), b=nn.Linear(8, 4)))
def Layer(self, x):
    h = nn.functional.layer_norm(x, (4,), self.norm.weight, self.norm.bias)
    h = nn.functional.linear(h, self.a.weight, self.a.bias)
    q, k = torch.tanh(h).chunk(2, -1)
    w = torch.softmax(q @ k.transpose(0, 1), -1)
    return x + nn.functional.linear(torch.cat([w @ k, q], -1), self.b.weight, self.b.bias)


class _IntoAll(torch.fx.Tracer):
    def is_leaf_module(self, m, module_qualified_name):
        return False


def graph_of(layers):
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    gm = torch.fx.GraphModule(model, _IntoAll().trace(model))
    record_values(gm, (torch.randn(3, 4),))
    adopt_values(gm)
    mark_regions(gm)
    return gm


def counted(monkeypatch, layers, policy):
    """Return (nodes, traces, fake runs, node visits of each kind) of one rewrite with an empty cache."""
    calls = {"trace": 0, "fake": 0}

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    gm = graph_of(layers)
    nodes = len(gm.graph.nodes)
    with monkeypatch.context() as patch:
        patch.setattr(identify_ops, "_CACHE", {})
        patch.setattr(identify_ops, "_operations", counting("trace", identify_ops._operations))
        patch.setattr(insert_casts, "run_node", counting("fake", insert_casts.run_node))
        run_passes(gm, standard_passes(policy), checked=False)
    return nodes, calls["trace"], calls["fake"]


@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "bf16,lists=autocast_cpu"])
def test_repeated_layers_are_traced_once_and_each_node_runs_at_most_once(monkeypatch, policy):
    few, traces, fakes = counted(monkeypatch, 3, policy)
    many, more_traces, more_fakes = counted(monkeypatch, 24, policy)
    assert many > 7 * few
    assert more_traces == traces <= few
    assert 0 < fakes <= few
    assert more_fakes <= many

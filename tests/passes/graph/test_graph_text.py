"""The stable text of a graph."""

import re

import torch
from torch import nn

from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.graph_text import graph_text
from amp_graph.passes.graph.propagate_fake_values import record_values
from tests.layers import layers
from tests.passes.graphs import capture_function


def text_of(function, *inputs):
    gm = torch.fx.symbolic_trace(function)
    record_values(gm, inputs)
    return graph_text(gm)


def test_a_small_graph_in_full():
    @layers(lambda: dict(scale=nn.Parameter(torch.ones(3))))
    def Model(self, x):
        a, b = torch.chunk(x * self.scale, 2)
        return {"a": a[:, ::2], "b": [b.to(torch.float64), None]}

    assert text_of(Model(), torch.randn(4, 3)).splitlines()[:5] == [
        "%0: f32[4,3] = input x",
        "%1: f32[3] = attribute scale",
        "%2: f32[4,3] = mul(%0, %1)",
        "%3: (f32[2,3], f32[2,3]) = chunk(%2, 2)",
        "%4: f32[2,3] = getitem(%3, 0)",
    ]
    assert "(:, ::2)" in text_of(Model(), torch.randn(4, 3))
    assert ".to(%5, f64)" in text_of(Model(), torch.randn(4, 3))


def test_subgraphs_come_after_indented():
    def function(s, x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    text = graph_text(capture_function(function, torch.randn(2)).fresh())
    assert text.count("\nsubgraph ") == 2
    assert "  %0" in text


def test_no_addresses_and_every_tensor_has_its_type():
    def function(s, x):
        with torch.no_grad():
            y = x * 2
        return torch.utils.checkpoint.checkpoint(torch.tanh, y + x, use_reentrant=False)

    gm = capture_function(function, torch.randn(2, requires_grad=True)).fresh()
    text = graph_text(gm)
    assert not re.search(r"0x[0-9a-f]{6,}", text)
    for node, line in zip(gm.graph.nodes, text.splitlines(), strict=False):
        assert (": f32[2]" in line) == (bool(tensors(value(node))) and node.op != "output")


def test_symbolic_sizes_are_shown():
    gm = capture_function(lambda s, x: x.relu(), torch.randn(5, 2), dynamic=True).fresh()
    assert re.search(r"f32\[s\d+,", graph_text(gm))

"""The graph as captured: nodes, what they read, the user's casts; and names with line breaks and signs of its text."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.report.graph_facts import split_reason
from tests.layers import layers


def captured(model, *inputs, policy="bf16"):
    torch.manual_seed(0)
    amp_graph.convert(model, policy)(*inputs)
    told = amp_graph.report(model)
    return told.graphs[0], told.graphs[0].captured


@layers(lambda: dict(fc=nn.Linear(8, 8)))
def Reads(self, x, y):
    z = torch.einsum("ab,cb->ac", self.fc(x), y.half().float())
    return nn.functional.pad(z, (1, 1), mode="constant").to(torch.float64)


def test_nodes_read_what_the_graph_says():
    graph, nodes = captured(Reads(), torch.randn(4, 8), torch.randn(3, 8))
    lines = graph.before.splitlines()
    assert [node.number for node in nodes] == [f"%{i}" for i in range(len(lines))]
    of = {node.name: node for node in nodes}
    (product,) = [node for node in nodes if node.call == "einsum"]
    assert [of[name].call for name in product.sources] == ["linear", ".float"]
    (linear,) = [node for node in nodes if node.call == "linear"]
    assert [of[name].kind for name in linear.sources] == ["input", "weight", "weight"]
    assert (linear.module, linear.type) == ("fc", "f32[4,8]")
    assert [node.call for node in nodes if node.kind == "cast"] == [".half", ".float", ".to"]
    assert {(node.call, node.module) for node in nodes if node.kind == "weight"} == {
        ("fc.weight", "fc"),
        ("fc.bias", "fc"),
    }
    assert nodes[-1].kind == "output"
    assert [of[name].call for name in nodes[-1].sources] == [".to"]


def test_a_node_keeps_its_name_through_the_rewriting():
    graph, nodes = captured(Reads(), torch.randn(4, 8), torch.randn(3, 8))
    new = {node.name for node in graph.operations} - {node.name for node in nodes}
    assert {node.ops for node in graph.operations if node.name in new} == {
        ("aten.transpose",),
        ("aten.matmul",),
    }  # einsum


@layers(lambda: dict(part=nn.Sequential(nn.Linear(8, 8), nn.GELU()), head=nn.Linear(8, 4)))
def Checkpointed(self, x):
    return self.head(checkpoint(self.part, x, use_reentrant=False))


@layers(lambda: dict(one=nn.Linear(8, 8), two=nn.Linear(8, 8)))
def Branches(self, x):
    return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.two(x).relu(), (x,))


@pytest.mark.parametrize("model", [Checkpointed, Branches])
def test_graphs_inside_are_read_too(model):
    _, nodes = captured(model(), torch.randn(4, 8))
    assert sum(node.call == "linear" for node in nodes) == 2
    names = {node.name for node in nodes}
    assert len(names) == len(nodes)
    assert all(source in names for node in nodes for source in node.sources)


@pytest.mark.parametrize("name", ["a\n%1: f32[2] = b", "quo'te", "%3", "x)  # y", "two\nlines"])
def test_names_that_mislead_change_no_other_node(name):
    Named = layers(lambda: {name: nn.Linear(8, 8)})(lambda self, x: self.get_submodule(name)(x).relu())
    graph, nodes = captured(Named(), torch.randn(4, 8))
    assert [node.call for node in nodes if node.kind == "operation"] == ["linear", ".relu"]
    assert [len(node.sources) for node in nodes if node.kind == "operation"] == [3, 1]
    assert graph.operations


@pytest.mark.parametrize(
    ("reason", "ops", "parts"),
    [
        ("aten.linear: a product", ("aten.linear",), ("a product", "")),
        ("linear_3 (aten.linear) takes low precision", (".to",), ("aten.linear takes low precision", "for linear_3")),
        ("carries no fp32 value", ("aten.view",), ("carries no fp32 value", "")),
    ],
)
def test_a_reason_is_words_and_figures(reason, ops, parts):
    assert split_reason(reason, ops) == parts

"""The demo's models, and what it tells of their operations."""

import torch
from torch import nn

import amp_graph
from examples.demo.explain import counts, excerpt
from examples.demo.models import ResNet
from tests.layers import forward_of


def test_the_network_halves_its_images_in_each_stage_but_the_first():
    model = ResNet((4, 8, 16))
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, out: sizes.append(tuple(out.shape[1:])))
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert sizes == [(4, 8, 8), (8, 4, 4), (16, 2, 2)]


def test_operations_with_one_reason_are_one_row_the_most_frequent_first():
    model = amp_graph.convert(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1)),
        "fp16,device=cuda",
    )
    assert excerpt(amp_graph.report(model)) == []
    model(torch.randn(4, 8))
    report = amp_graph.report(model)
    rows = [(op, count, precision) for op, count, precision, _ in excerpt(report)]
    assert rows == [("linear", 2, "low"), ("softmax", 1, "full")]
    assert counts(report) == {"low": 2, "full": 1}
    assert counts(None) == {}


def test_a_gain_of_one_node_does_not_divide_a_row():
    @forward_of(nn.Module)
    def Sums(self, x, y):
        z = x @ y
        return torch.bmm(z[None], z[None]).view(-1) + (z @ z).view(-1)

    model = amp_graph.convert(Sums(), "bf16,device=cuda")
    model(torch.randn(8, 8), torch.randn(8, 8))
    rows = excerpt(amp_graph.report(model))
    assert len({(precision, reason) for _, _, precision, reason in rows}) == len(rows)
    assert ("matmul, bmm", 3) in [row[:2] for row in rows]
    assert not [row for row in rows if "between" in row[3]]

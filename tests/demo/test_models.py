"""The demo's models, and what it tells of their operations."""

import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.demo.explain import counts, excerpt
from amp_graph.demo.models import ResNet


def test_the_network_halves_its_images_in_each_stage_but_the_first():
    model = ResNet((4, 8, 16))
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, given, out: sizes.append(tuple(out.shape[1:])))
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert sizes == [(4, 8, 8), (8, 4, 4), (16, 2, 2)]


def test_operations_are_told_by_name_the_most_frequent_first():
    model = amp_graph.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1)), "fp16,device=cuda")
    model(torch.randn(4, 8))
    graphs = conversion_of(model).graphs
    rows = [(op, count, precision) for op, count, precision, _ in excerpt(graphs)]
    assert rows == [("linear", 2, "low"), ("softmax", 1, "full")]
    assert counts(graphs)["low"] == 2
    assert excerpt([]) == []

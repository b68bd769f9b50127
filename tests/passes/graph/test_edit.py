"""Nodes that a pass inserts have a value, and the place in the user's code of the node that they come before."""

import torch
from torch import nn

from amp_graph.passes.graph import node_info
from amp_graph.passes.graph.edit import insert_call
from amp_graph.passes.graph.fake_values import fake_mode_of, value
from tests.passes.graphs import capture


def test_an_inserted_call_has_the_place_of_the_node_that_it_comes_before():
    x = torch.randn(3, 4)
    made = capture(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), x)
    gm = made.fresh()
    (linear,) = (n for n in gm.graph.nodes if n.target is torch.nn.functional.linear or "linear" in n.name)
    call = insert_call(linear, fake_mode_of(gm), torch.sum, linear.args[0], 0, keepdim=True)
    assert node_info.module_path(call) == node_info.module_path(linear) == "1"
    assert call.meta["stack_trace"] == linear.meta["stack_trace"]
    assert (value(call).shape, value(linear).shape) == ((1, 4), (3, 2))

"""What a call wrote is undone: its inputs, its buffers, and random numbers; a parameter is not."""

import torch
from torch import nn

from amp_graph.graph_breaks.call_snapshot import BeforeCall


def model_of(*kinds):
    model = nn.Linear(3, 3)
    made = {"strided": torch.zeros(3), "sparse": torch.eye(3).to_sparse(), "later": nn.UninitializedBuffer()}
    for kind in kinds:
        model.register_buffer(kind, made[kind])
    return model


def test_inputs_buffers_and_random_numbers_are_as_before():
    model, x = model_of("strided", "sparse", "later"), torch.ones(2)
    before = BeforeCall(model, ({"x": x},))
    x.mul_(3)
    model.strided += 1
    drawn = torch.rand(2)
    assert not before.is_lost()
    before.restore()
    assert x.tolist() == [1, 1]
    assert model.strided.tolist() == [0, 0, 0]
    assert torch.equal(torch.rand(2), drawn)


def test_a_parameter_that_was_written_is_lost():
    model = model_of()
    before = BeforeCall(model, ())
    assert not before.is_lost()
    with torch.no_grad():
        model.weight.add_(1)
    assert before.is_lost()

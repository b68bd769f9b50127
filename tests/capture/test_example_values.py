"""What `rewrite` says of example inputs that are not those of a traced graph."""

import logging

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import amp_graph
from amp_graph.errors import CaptureError
from tests.layers import layers

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@layers(lambda: dict(linear=nn.Linear(4, 4)))
def Masked(self, x):
    """Which rows are returned depends on their numbers."""
    return self.linear(x)[x[:, 0] > 0]


WRONG = {
    "a tensor": (X, r"example_inputs is a Tensor, not a sequence of the graph's inputs(?=\n.*in order: input)"),
    "by name": ({"input": X}, "example_inputs is a dict"),
    "none": ((), "0 example_inputs for a graph of 1 inputs"),
    "too many": ((X, X), "2 example_inputs for a graph of 1 inputs"),
    "another size": ((torch.randn(3, 5),), r"does not run on the example_inputs \(while executing .*reduction dim"),
    "another type": (("x",), r"does not run on the example_inputs .*must be Tensor, not str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_error_says_what_is_wrong(name, caplog):
    inputs, said = WRONG[name]
    graph = symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    told = rf"{said}(?s:.*)\n  legal: (?s:.*)\n  fix:   "
    with caplog.at_level(logging.DEBUG), pytest.raises(CaptureError, match=told):
        amp_graph.rewrite(graph, "bf16", inputs)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert torch.equal(graph(X), amp_graph.rewrite(graph, "O0", (X,))(X)), "the graph is as it was"


DEPENDING = {"rows": Masked, "cumulative average": lambda: nn.BatchNorm1d(4, momentum=None)}


@pytest.mark.parametrize("name", DEPENDING)
def test_numbers_that_a_shape_depends_on_are_named(name):
    graph = symbolic_trace(nn.Sequential(nn.Linear(4, 4), DEPENDING[name]()))
    with pytest.raises(CaptureError, match=r"depends on the numbers of its inputs \(while executing %") as told:
        amp_graph.rewrite(graph, "bf16", (X,))
    assert "fix:   amp_graph.convert(model)" in str(told.value)
    assert type(told.value.__cause__).__module__.startswith("torch.")


def test_inputs_with_a_default_may_be_left_out():
    @layers(lambda: dict(linear=nn.Linear(4, 4)))
    def Scaled(self, x, scale=2.0):
        return self.linear(x) * scale

    graph = symbolic_trace(Scaled())
    for inputs in ((X,), (X, 3.0)):
        got, wanted = amp_graph.rewrite(graph, "bf16", inputs)(*inputs), graph(*inputs)
        assert 0 < (got - wanted).norm() <= 0.01 * wanted.norm()

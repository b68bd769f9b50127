"""GRU layers in low precision: as exact as torch.autocast's, which carry their state in fp32."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.lists import load
from amp_graph.passes.backends.recurrent.rnn_functions import recurrent_whole
from tests.passes.drawn import drawn
from tests.passes.graphs import BF16
from tests.relative_error import error

LENGTH, BATCH, WIDTH, SIZE = 40, 4, 24, 32


def built(**options):
    torch.manual_seed(0)
    return nn.GRU(WIDTH, SIZE, **options)


def step(call, layers, x):
    """Output, last state, and gradients of the input and parameters."""
    x = x.clone().requires_grad_()
    out, last = call(x)
    loss = (out.double() * drawn(*out.shape, seed=5)).sum() + (last.double() * drawn(*last.shape, seed=6)).sum()
    return [out.detach(), last.detach(), *torch.autograd.grad(loss, [x, *layers.parameters()])]


FORMS = {
    "one layer": {},
    "two": {"num_layers": 2},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "batch first": {"batch_first": True},
    "without biases": {"bias": False},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_less_exact_than_under_autocast(form):
    layers, x = built(**FORMS[form]), drawn(LENGTH, BATCH, WIDTH, seed=1)
    double = built(**FORMS[form]).double()
    exact = step(double, double, x.double())
    other = step(torch.autocast("cpu", BF16)(layers), layers, x)
    model = amp_graph.convert(built(**FORMS[form]), "bf16")
    mine = step(model, model, x)
    assert conversion_of(model).runs == 1
    for got, autocast, true in zip(mine, other, exact, strict=True):
        assert got.shape == true.shape
        assert error(got, true) <= 1.1 * error(autocast, true)


def test_control_a_state_that_is_rounded_is_less_exact():
    x = drawn(200, BATCH, WIDTH, seed=1)
    exact = built().double()(x.double())[0]
    mine = amp_graph.convert(built(), "bf16")(x)[0]
    low = built().bfloat16()
    with torch.no_grad():
        rounded = low(x.bfloat16())[0]
    assert error(mine, exact) < 0.75 * error(rounded, exact)


def test_of_other_precisions_layers_are_torchs_and_packed_sequences_stay_full():
    double, x = built().double(), drawn(7, 3, WIDTH, seed=1).double()
    hidden = [torch.zeros(1, 3, SIZE, dtype=torch.float64)]
    whole = recurrent_whole("gru", x, hidden, list(double.parameters()), True, 1, 0.0, True, False, False)[0]
    assert torch.equal(whole, double(x)[0])
    ours = load("default", dtype="bfloat16", device="cpu")
    assert ours.lookup(torch.ops.aten.gru.input, {}).cls == "allow"
    assert ours.lookup(torch.ops.aten.gru.data, {}).cls == "follow"  # the kernel for these rounds the state

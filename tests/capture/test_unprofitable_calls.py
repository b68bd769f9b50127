"""A call that is left alone is told from one that is not, whichever way it is asked."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture import unprofitable_calls
from amp_graph.capture.conversion import conversion_of
from tests.passes.planning import machine

PLAN = "amp_graph.passes.precision.plan_precision.machine_for"
pytestmark = [
    pytest.mark.by_profit,
    pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning"),
]


@pytest.fixture
def alone(monkeypatch):
    """A converted model, a batch for which it is left alone without gradients, and the kinds that were looked up."""
    monkeypatch.setattr(PLAN, lambda device: machine("cpu_bf16"))
    model = amp_graph.convert(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), "auto")
    x = torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    asked, find = [], unprofitable_calls._kind_of
    monkeypatch.setattr(unprofitable_calls, "_kind_of", lambda *call: asked.append(find(*call)) or asked[-1])
    return model, x, asked


def test_a_call_like_the_last_is_told_at_a_look(alone):
    model, x, asked = alone
    runs = conversion_of(model).runs
    with torch.no_grad():
        found = model(x)
    assert not asked
    assert conversion_of(model).runs == runs
    assert torch.equal(found, amp_graph.revert(model)(x).detach())


OTHERS = {
    "another batch": lambda model, x: model(x[:1]),
    "other strides": lambda model, x: model(torch.randn(64, 2).t()),
    "double precision": lambda model, x: model.double()(x.double()),
    "evaluation": lambda model, x: model.eval()(x),
    "inference mode": lambda model, x: torch.inference_mode()(model)(x),
    "gradients": lambda model, x: torch.enable_grad()(model)(x),
    "by keyword": lambda model, x: model(input=x),
    "a parameter": lambda model, x: model(nn.Parameter(x)),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "autocast": lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_other_calls_are_not(alone, name):
    model, x, asked = alone
    with torch.no_grad():
        found = OTHERS[name](model, x)
    assert asked
    assert found.dtype == next(model.parameters()).dtype  # under autocast, too


def test_calls_of_two_kinds_are_each_told_again(alone):
    """Strides are no part of a kind: what tells the one says no to the other."""
    model, x, asked = alone
    with torch.no_grad():
        for _ in range(2):
            assert all(torch.equal(model(given), model(given)) for given in (x, torch.randn(64, 2).t()))
    assert len(asked) == 3  # the second of each pair was told at a look, and the first of all
    assert len(conversion_of(model)._alone.kinds) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_does_no_harm(alone):
    model, _, _ = alone
    ragged = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)])
    with torch.no_grad():
        assert model(ragged).is_nested


def test_where_parameters_are_elsewhere_nothing_is_told_at_a_look(alone):
    """Autocast of their kind of device would not be seen."""
    model, x, asked = alone
    model.register_parameter("elsewhere", nn.Parameter(torch.empty(1, device="meta")))
    strided = x.clone().t().contiguous().t()
    with torch.no_grad():
        for _ in range(3):
            model(x[:1])
            model(strided)  # other strides: the guard is made anew
    del asked[:]
    with torch.no_grad():
        model(strided)
    assert asked


@pytest.mark.parametrize(("size", "alone"), [(8, True), (64, False)])
def test_small_convolutions_are_left_alone(size, alone, monkeypatch):
    """64 channels of 8 x 8 take 130 us in fp32 and took 260 in bf16: its kernel is long in coming."""
    monkeypatch.setattr(PLAN, lambda device: machine("cpu_amx"))
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    x = torch.randn(1, 3, size, size)
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(amp_graph.convert(model, "auto")(x), wanted) == alone

"""A converted model under torch's other tools, and parts of converted models: each works, or says what to do."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CaptureError, PolicyError
from tests.relative_error import error

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


# -- parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("called", [False, True])
def test_a_part_of_a_converted_model_is_not_converted_again(called):
    model = amp_graph.convert(net(), "bf16")
    if called:
        model(X)
    with pytest.raises(CaptureError, match=r"this Linear is submodule '2' of a converted Sequential(?s:.*)fix:"):
        amp_graph.convert(model[2], "bf16")
    assert conversion_of(model[2]) is None
    assert error(model(X), amp_graph.revert(copy.deepcopy(model))(X)) < 2e-2
    assert conversion_of(model).runs == 1 + called


def test_what_is_no_part_any_more_is_converted():
    model = amp_graph.convert(net(), "bf16")
    taken, model[2] = model[2], nn.Linear(16, 4)
    assert amp_graph.convert(taken, "bf16") is taken
    amp_graph.revert(model)
    assert amp_graph.convert(model[0], "bf16") is model[0]


def test_a_part_of_a_model_that_nobody_has_is_converted():
    model = amp_graph.convert(net(), "bf16")
    part = model[2]
    gc.unfreeze()  # what the tests' settings keep the collector from
    del model
    assert amp_graph.convert(part, "bf16") is part


def test_a_part_that_two_converted_models_share_runs_in_both():
    shared = nn.Linear(8, 8)
    one, two = (amp_graph.convert(nn.Sequential(shared, nn.Linear(8, n)), "bf16") for n in (2, 3))
    assert (one(X).shape, two(X).shape) == ((4, 2), (4, 3))
    with pytest.raises(CaptureError, match="submodule '0'"):
        amp_graph.convert(shared, "bf16")


def test_a_converted_model_put_into_a_converted_one_runs_with_it():
    """As code that escaped capture: under autocast, where fp32's operands would not fit."""
    model, head = amp_graph.convert(net(), "bf16"), amp_graph.convert(nn.Linear(16, 4), "bf16")
    model[2] = head
    wanted = F.linear(F.relu(F.linear(X, model[0].weight, model[0].bias)), head.weight, head.bias)
    with pytest.warns(AmpGraphWarning):
        found = model(X)
    found.sum().backward()
    assert error(found, wanted) < 2e-2
    assert head.weight.grad.dtype is torch.float32


# -- tools --------------------------------------------------------------------------------------------

TOOLS = {
    "script": lambda model: torch.jit.script(model),
    "script of a holder": lambda model: torch.jit.script(nn.Sequential(model)),
    "trace": lambda model: torch.jit.trace(model, X),
    "export": lambda model: torch.export.export(model, (X,)),
    "symbolic_trace of a holder": lambda model: torch.fx.symbolic_trace(nn.Sequential(model)),
    "make_fx": lambda model: make_fx(model)(X),
}


@pytest.fixture
def _without_hooks_of_export():
    """Remove the hook on all modules that an export that fails leaves on torch 2.11: Dynamo does not trace it."""
    yield
    torch.nn.modules.module._global_buffer_registration_hooks.clear()


@pytest.mark.usefixtures("_without_hooks_of_export")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_traces_says_what_to_do(tool):
    model = amp_graph.convert(net(), "bf16")
    with pytest.raises(
        CaptureError, match=r"cannot be traced or exported(?s:.*)fix:   export amp_graph\.revert(?s:.*)rewrite"
    ):
        TOOLS[tool](model)
    assert model(X).shape == (4, 4)
    assert conversion_of(model).runs == 1


def test_other_weights_by_functional_call():
    model, others = amp_graph.convert(net(), "bf16"), {n: p.detach() * 2 for n, p in net().named_parameters()}
    model(X)
    wanted = torch.func.functional_call(net(), others, (X,))
    assert error(torch.func.functional_call(model, others, (X,)), wanted) < 2e-2
    assert error(model(X), net()(X)) < 2e-2


# -- the backend's options ----------------------------------------------------------------------------


def compiled(**options):
    return torch.compile(net(), backend="amp_graph", **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"options": {"policy": "bf61"}}, "did you mean 'bf16'"),
        ({"mode": "fast"}, r"unknown mode='fast'\n  legal: default(?s:.*)fix:"),
        ({"options": {"mode": "max-autotune", "compile": "eager"}}, r"one of Inductor's(?s:.*)fix:"),
        (
            {"options": {"polic": "bf16"}},
            r"unknown option 'polic'\n  legal: policy, compile, mode, and options of Inductor(?s:.*)fix:",
        ),
    ],
)
def test_what_the_backend_does_not_know(options, told):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=told) as caught:
        compiled(**options)(X)
    assert isinstance(caught.value.inner_exception, PolicyError)


def test_options_name_the_policy():
    assert 0 < error(compiled(options={"policy": "bf16"})(X), net()(X)) < 2e-2
    assert error(compiled(options={"policy": "bf16-O0"})(X), net()(X)) == 0

"""Converting a model runs none of its owner's code: parametrizations, properties, lazy and missing parameters."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.passes.torch_compat import modules, torch_version
from tests.by_hand import descend
from tests.capture.test_failing_conversions import state_of
from tests.layers import forward_of, layers
from tests.relative_error import error

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


@forward_of(nn.Module, calls=0)
def Doubled(self, weight):
    """A parametrization that counts how often it is computed."""
    Doubled.calls += 1
    return weight * 2


def doubled(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


KINDS = {
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "custom": doubled,
    "spectral norm by hooks": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def train(model, optimizer):
    for _ in range(2):
        descend(optimizer, F.cross_entropy(model(X), Y))
    return model.eval()(X)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_converting_computes_no_parametrization_and_training_is_as_under_autocast(kind, policy):
    ours = nn.Sequential(KINDS[kind](nn.Linear(16, 16)), nn.ReLU(), KINDS[kind](nn.Linear(16, 4)))
    with torch.no_grad():
        ours(X)  # makes plain attributes of what hooks compute, which are copied where they have no gradient
    plain, cast = copy.deepcopy(ours), copy.deepcopy(ours)
    before, calls = [b.clone() for b in ours.buffers()], Doubled.calls
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, cast, ours)]
    amp_graph.convert(ours, policy)
    assert all(map(torch.equal, ours.buffers(), before))
    assert Doubled.calls == calls
    exact = train(plain, optimizers[0])
    with torch.autocast("cpu", torch.bfloat16):
        theirs = train(cast, optimizers[1])
    assert error(train(ours, optimizers[2]), exact) <= 1.2 * error(theirs, exact) + 2e-3
    assert all(b.dtype is torch.float32 for b in ours.buffers() if b.is_floating_point())


class Hidden(nn.Module):
    """Stores a weight, and has properties that are none of ours to read."""

    def __init__(self):
        super().__init__()
        self.stored = nn.Parameter(torch.eye(16))

    @property
    def weight(self):
        raise RuntimeError("read")

    sparse = amp_precision = _can_record_outputs = weight

    def forward(self, x):
        return x @ self.stored


@layers(lambda: dict(inner=nn.Linear(16, 16)), __getattr__=lambda self, name: vars(self)["_modules"][name])
def Strict(self, x):
    """Has a `__getattr__` that raises something else: a KeyError."""
    return self.inner(x)


@pytest.mark.parametrize("policy", ["bf16", "bf16-O2"])
@pytest.mark.parametrize("kind", [Hidden, Strict])
def test_properties_and_getattr_are_not_asked(kind, policy):
    model = nn.Sequential(kind(), nn.Linear(16, 4))
    exact = model(X)
    amp_graph.convert(model, policy)
    captured = kind is Hidden or torch_version() >= (2, 14)  # up to 2.13 Dynamo asks, and gives the frame up
    with contextlib.nullcontext() if captured else pytest.warns(AmpGraphWarning, match="nothing was captured"):
        assert error(model(X), exact) < 2e-2  # under autocast if not captured
    assert conversion_of(model).runs == captured


@pytest.mark.parametrize("take", [lambda layer: setattr(layer, "weight", None), lambda layer: delattr(layer, "weight")])
def test_a_missing_weight_is_an_error_of_the_call_as_without_us(take):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    take(model[1])
    with pytest.raises((AttributeError, TypeError)) as before:
        model(X)
    amp_graph.convert(model, "bf16")
    with pytest.raises(type(before.value)):
        model(X)
    amp_graph.revert(model)


@layers(lambda: dict(down=nn.Linear(16, 0), up=nn.Linear(0, 4)))
def Narrow(self, x):
    return self.up(self.down(x))


@pytest.mark.parametrize("make", [lambda: nn.Linear(16, 0), Narrow, lambda: nn.Linear(0, 4)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_elements(make):
    model = make()
    x = X[:, :0] if getattr(model, "in_features", 1) == 0 else X
    exact = model(x)
    found = amp_graph.convert(model, "bf16")(x)
    found.sum().backward()
    torch.testing.assert_close(found, exact)


# -- lazy modules -------------------------------------------------------------------------------------


def lazy():
    return nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_the_first_call_initializes_lazy_modules():
    model = lazy()
    amp_graph.convert(model, "bf16")
    assert not amp_graph.report(model).graphs
    model(X.view(8, 2, 8)).sum().backward()
    assert [type(m) for m in model][::2] == [nn.Conv1d, nn.ReLU, nn.Linear]
    exact = amp_graph.revert(copy.deepcopy(model)).eval()(X.view(8, 2, 8))
    assert error(model.eval()(X.view(8, 2, 8)), exact) < 2e-2
    assert conversion_of(model).runs == 2


@layers(lambda: dict(one=nn.LazyLinear(4), two=nn.LazyLinear(4)))
def Branches(self, x, second=False):
    return self.two(x) if second else self.one(x)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_stays_lazy_after_a_call_does_no_harm():
    model = amp_graph.convert(Branches(), "bf16")
    model(X).sum().backward()
    assert modules.uninitialized(model.named_parameters()) == ["two.weight", "two.bias"]
    assert amp_graph.report(model).text()
    model(X, second=True).sum().backward()
    assert conversion_of(model).runs == 2


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_train_step_initializes_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(4))
    step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.5), "bf16")
    losses = [step(X, Y).item() for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("policy", ["bf16-O2", "bf16-O3"])
def test_levels_that_change_parameters_want_them_initialized(policy):
    model = nn.Sequential(nn.LazyLinear(4))
    kinds = [type(p) for p in model.parameters()]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(CaptureError, match=r"2 are not initialized: 0\.weight, 0\.bias\n  fix: "):
        amp_graph.convert(model, policy)
    with pytest.raises(CaptureError, match="not initialized"):
        amp_graph.TrainStep(model, F.cross_entropy, optimizer, policy)
    assert conversion_of(model) is None
    assert [type(p) for p in model.parameters()] == kinds
    model(X)
    assert amp_graph.convert(model, policy)[0].weight.dtype is torch.bfloat16


# -- how modules are read -----------------------------------------------------------------------------


def test_state_of_sees_a_change():
    """The control of the tests of what stays as it was."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = state_of(model, optimizer)
    amp_graph.convert(model, "bf16")
    assert state_of(model, optimizer) != before

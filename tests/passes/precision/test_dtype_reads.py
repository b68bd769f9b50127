"""Code that sees dtypes (``x.dtype``, an ``autograd.Function``) finds autocast's, where that keeps low values low."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd

import amp_graph
from amp_graph.capture.conversion import conversion_of
from tests.measure import DtypeLog

# Dynamo makes an instance of a function that it traces; Inductor imports what uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

BF16, FP16, FULL = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16}
X = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)


class Converts(Pair):
    """What is computed in double comes back in the dtype of what it is added to."""

    def forward(self, x):
        h = self.first(x)
        return self.second(h + x.double().cumsum(1).to(h.dtype))


class Makes(Pair):
    """A bias of attention scores, as far down as their dtype goes."""

    def forward(self, x):
        scores = self.first(x)
        least = torch.full(scores.shape, torch.finfo(scores.dtype).min, dtype=scores.dtype).triu(1)
        return self.second((scores + least).clamp(min=torch.finfo(scores.dtype).min).softmax(-1))


class ReadsInputs(Pair):
    """The dtype of an input is fp32 under autocast, too."""

    def forward(self, x):
        return self.second(self.first(x) + x.double().cumsum(1).to(x.dtype))


class OnlyConverts(Pair):
    """As attention that is written out does: nothing low meets what was made."""

    def forward(self, x):
        q = self.first(x)
        return self.second(torch.softmax(q, -1, dtype=torch.float32).to(q.dtype))


class NamesADtype(Pair):
    """An instruction is no reading."""

    def forward(self, x):
        return self.second(self.first(x) + x.double().cumsum(1).to(torch.float32))


class Branches(Converts):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (super().forward(x),))


class Rounds(torch.autograd.Function):
    """To a grid, with the gradient of what was inside of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 2).to(grad.dtype)


class InFull(torch.autograd.Function):
    """Its owner wants fp32."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.exp(x)


class Multiplies(torch.autograd.Function):
    """What autocast would cast for."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Quantized(Pair):
    def forward(self, x):
        return self.second(Rounds.apply(self.first(x)))


class Exponential(Pair):
    def forward(self, x):
        return self.second(InFull.apply(self.first(x)))


class Twice(Pair):
    def forward(self, x):
        return self.second(Multiplies.apply(self.first(x), self.first.weight))


class Hooked(Pair):
    """torch 2.11 and 2.12 write a custom function for the hook."""

    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda grad: grad / 2)
        return self.second(h)


class HookedTwice(Hooked):
    def forward(self, x):
        h = self.first(x)
        for factor in (2, 3):
            h.register_hook(lambda grad, factor=factor: grad * factor)
        return self.second(torch.relu(h) + h)


class HookedFunction(Hooked):
    """A function of the user's whose result has a hook."""

    def forward(self, x):
        h = Rounds.apply(self.first(x))
        h.register_hook(lambda grad: grad / 2)
        return self.second(h)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = amp_graph.convert(Converts(), "bf16")

    def forward(self, x):
        return self.part(x) * 2


ASKS = [Converts, Makes, Quantized, Exponential]
ASKS_NOT = [ReadsInputs, OnlyConverts, NamesADtype, Twice, Hooked, HookedTwice]


def made(kind, policy=None, **options):
    torch.manual_seed(0)
    model = kind()
    return model if policy is None else amp_graph.convert(model, policy, **options)


def dtypes(model, *names):
    with DtypeLog() as log:
        model(X)
    return [found for name, (found, *_) in log.entries if name in names]


def asks(model):
    return bool(conversion_of(model).runners.run.asking)


SEEN = ("aten.add", "aten.clamp", "aten.round", "aten.exp")


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_what_code_makes_of_dtypes_that_it_sees_is_what_autocast_has(kind, policy):
    model = made(kind, policy)
    model(X)
    with torch.autocast("cpu", DTYPES[policy]):
        theirs = dtypes(made(kind), *SEEN)
    assert theirs == [FULL if kind is Exponential else DTYPES[policy]] * len(theirs)
    assert dtypes(model, *SEEN) == theirs
    assert model(X).dtype == FULL


@pytest.mark.parametrize("kind", [Converts, Makes, Quantized])
def test_control_captured_in_fp32_it_raises_what_is_low(kind):
    model = made(kind, "bf16,escaped=fp32")
    model(X)
    assert FULL in dtypes(model, *SEEN)


def test_a_function_with_products_stays_opaque_in_a_graph_with_a_plan():
    model = made(Twice, "bf16")
    model(X)
    assert dtypes(model, "aten.mm") == [FULL]
    (graph,) = amp_graph.report(model).graphs
    assert [n.precision for n in graph.operations if n.ops == ("aten.linear",)] == ["low", "low"]


@pytest.mark.parametrize("kind", ASKS)
def test_there_is_a_plan_and_a_note_and_nothing_escapes(kind):
    model = made(kind, "bf16")
    model(X)
    report = amp_graph.report(model)
    (graph,) = report.graphs
    assert [n.precision for n in graph.operations if n.ops == ("aten.linear",)] == ["low", "low"]
    assert any("branches on dtypes" in note for note in report.notes)
    assert not report.escaped
    assert not report.skipped


@pytest.mark.parametrize("kind", ASKS_NOT)
def test_other_code_is_captured_in_fp32_and_once(kind):
    model = made(kind, "bf16")
    model(X)
    assert not asks(model)
    assert len(amp_graph.report(model).graphs) == 1


def test_a_function_is_seen_whose_result_has_a_hook():
    model = made(HookedFunction, "bf16")
    model(X)
    assert asks(model)


def test_the_dtype_that_is_read_is_the_one_of_the_plan():
    """Only values that are low by the plan count: with them in fp32 nothing is raised."""
    model = made(Converts, "bf16,keep_fp32=first")
    model(X)
    assert not asks(model)


@pytest.mark.parametrize("kind", ASKS)
@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_gradients_are_as_exact_as_autocasts(kind, compile):
    def gradients(model, x, low):
        with torch.autocast("cpu", BF16, enabled=low):
            out = model(x)
        out.float().square().sum().backward()
        return [out.detach().double(), *(p.grad.double() for p in model.parameters())]

    exact = gradients(made(kind).double(), X.double(), False)
    theirs, ours = gradients(made(kind), X, True), gradients(made(kind, "bf16", compile=compile), X, False)
    for one, other, want in zip(ours, theirs, exact, strict=True):
        assert (one - want).norm() <= 1.15 * (other - want).norm() + 1e-7 * want.norm()


class RoundsInTraining(nn.Module):
    """As BLOOM, whose activation is a function of its own in training only, and which returns logits."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 96)

    def forward(self, x):
        h = self.first(x)
        return self.second(Rounds.apply(h) if self.training else h)


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_mode_computes_does_not_depend_on_calls_in_another(grad):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    trained = made(RoundsInTraining, "bf16")
    trained(x).sum().backward()
    assert asks(trained)
    fresh = made(RoundsInTraining, "bf16").eval()
    copied = copy.deepcopy(trained).eval()
    with torch.set_grad_enabled(grad):
        expected = fresh(x)
        assert not asks(fresh)
        assert torch.equal(trained.eval()(x), expected)
        assert torch.equal(copied(x), expected)


def test_other_shapes_and_modes_are_captured_so_as_well():
    model = made(Converts, "bf16", dynamic=False)
    for rows in (6, 5, 4):
        model(X[:rows])
    with torch.no_grad():
        model(X)
    model.eval()
    model(X)
    assert asks(model)
    report = amp_graph.report(model)
    assert len(report.graphs) == 4  # nothing here depends on training or not
    assert all(n.precision == "low" for g in report.graphs for n in g.operations if n.ops == ("aten.linear",))


def test_what_could_not_be_planned_then_is_captured_in_fp32():
    model = made(Branches, "bf16")
    model(X)
    assert not asks(model)
    (graph,) = amp_graph.report(model).graphs
    assert [n.precision for n in graph.operations if n.ops == ("aten.linear",)] == ["low", "low"]


@pytest.mark.parametrize("planner", ["mincut", "paint"])
def test_it_is_asked_whatever_plans(planner):
    model = made(Converts, f"bf16,planner={planner}")
    model(X)
    assert asks(model)


def test_a_plan_that_counts_errors_counts_those_of_its_own_graph():
    model = made(Converts, "bf16,accuracy=1.5")
    model(X)
    assert not asks(model)


def test_a_part_of_a_model_asks_for_itself():
    model = Scaled()
    out = model(X)
    assert asks(model.part)
    assert not torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(out, model.part(X) * 2)


def test_each_call_reads_the_updated_weights():
    model = made(Converts, "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = made(Converts)
    for _ in range(3):
        before = model(X)
        before.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reference.load_state_dict(model.state_dict())
    with torch.autocast("cpu", BF16):
        theirs = reference(X)
    torch.testing.assert_close(model(X), theirs.float(), rtol=2e-2, atol=2e-2)
    assert not torch.equal(model(X), before)

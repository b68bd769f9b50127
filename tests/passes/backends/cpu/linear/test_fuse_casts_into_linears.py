"""Small linears that read their parameters themselves have the bits of casts, in every mode of autograd."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.linear import amx_gemm, fuse_casts_into_linears
from amp_graph.passes.backends.cpu.linear import panel_gemm as kernel
from amp_graph.passes.backends.cpu.linear.fuse_casts_into_linears import linear_of
from amp_graph.passes.weights.cast_cache import WeightCopies
from tests.passes.builds import every_build, memory_that_is_not_zero  # noqa: F401

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")
BF16 = torch.bfloat16
PLAIN = "bf16,skip=fuse_casts_into_linears"


class Net(nn.Module):
    """Linears with biases and without, of which one is frozen and one reads three dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64, bias=False)
        self.frozen, self.last = nn.Linear(64, 64), nn.Linear(64, 32)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = F.gelu(self.second(torch.relu(self.first(x))))
        return self.last(F.silu(self.frozen(x.view(4, -1, 64)))).view(-1, 32)


X = torch.randn(24, 32, generator=torch.Generator().manual_seed(5))


def net(policy="bf16"):
    torch.manual_seed(0)
    return amp_graph.convert(Net(), policy)


def text(model):
    return amp_graph.report(model).graphs[0].text


def gradients(model, x=X):
    x = x.clone().requires_grad_()
    out = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out, *torch.autograd.grad(out.square().sum(), [x, *trained])]


@pytest.mark.usefixtures("every_build")
def test_results_and_gradients_are_those_of_casts(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    ours, plain = net(), net(PLAIN)
    for _ in range(3):
        assert all(map(torch.equal, gradients(ours), gradients(plain)))
    assert text(ours).count("linear_of_parameters(") == 4
    assert "linear_low(" in text(plain)


def test_control_a_gradient_that_is_not_rounded_differs(monkeypatch):
    monkeypatch.setattr(amx_gemm, "library", lambda: None)
    monkeypatch.setattr(kernel, "WIDENED", kernel.SUMS)
    assert not all(map(torch.equal, gradients(net()), gradients(net(PLAIN))))


def test_training_has_the_bits_of_casts():
    pair = net(), net(PLAIN)
    steps = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2) for m in pair]
    for turn in range(4):
        for model, optimizer in zip(pair, steps, strict=True):
            optimizer.zero_grad()
            for part in (X, X + turn):  # accumulated
                model(part).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, *(m.parameters() for m in pair)))


class Casts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = []

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.dtype != args[0].dtype:
            self.shapes.append(tuple(found.shape))
        return found


def weights_cast(model, micro_batches=3):
    """Return how many weights, or gradients of them, are cast in each of an update's calls, and in its backward."""
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    forward, backward = [], []
    for _ in range(micro_batches):
        with Casts() as seen:
            out = model(X)
        forward.append(sum(shape in shapes for shape in seen.shapes))
        with Casts() as seen:
            out.sum().backward()
        backward.append(sum(shape in shapes for shape in seen.shapes))
    return forward, backward


@pytest.mark.parametrize("policy", ["bf16", PLAIN])
def test_weights_are_cast_once_an_update_and_no_gradient_of_theirs(policy):
    model = net(policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        forward, backward = weights_cast(model)
        optimizer.step()
    assert forward[0] == 3, "the frozen one stays"
    assert forward[-1] == 0
    assert backward == ([0] * 3 if policy == "bf16" else [3] * 3), "the control: with casts autograd's are there"


def test_what_is_written_between_forward_and_backward_is_not_read():
    ours, expected = net(), gradients(net())
    x = X.clone().requires_grad_()
    out = ours(x)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(2)
    found = torch.autograd.grad(out.square().sum(), [x, *(p for p in ours.parameters() if p.requires_grad)])
    assert all(map(torch.equal, found, expected[1:]))


@pytest.fixture
def function():
    return linear_of(WeightCopies(BF16).read)


def parameters():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(48, 32) / 6), nn.Parameter(torch.randn(48))


def test_second_derivatives(function):
    weight, bias = parameters()
    x = X.to(BF16).requires_grad_()

    def second(function, *given):
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), given)

    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    for one, true in zip(second(function, x, weight, bias), second(F.linear, *wide), strict=True):
        assert (one - true).norm() <= 0.02 * true.norm()


def test_several_gradients_at_once(function):
    weight, bias = parameters()
    x = X.to(BF16).requires_grad_()
    grad = torch.randn(24, 48, generator=torch.Generator().manual_seed(1)).to(BF16)
    many = torch.stack([grad, -2 * grad])
    together = torch.autograd.grad(function(x, weight, bias), (x, weight, bias), many, is_grads_batched=True)
    for i, one in enumerate(many):
        alone = torch.autograd.grad(function(x, weight, bias), (x, weight, bias), one)
        for found, true in zip(together, alone, strict=True):
            assert found.dtype == true.dtype
            torch.testing.assert_close(found[i], true, rtol=2**-6, atol=2**-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_modes_get_torchs_own(function):
    weight, bias = parameters()
    x = X.to(BF16)
    expected = F.linear(x, weight.to(BF16), bias.to(BF16))
    with torch.no_grad():
        torch.testing.assert_close(
            torch.vmap(lambda row: function(row, weight, bias))(x), expected, rtol=0.02, atol=0.02
        )
    with torch.autograd.forward_ad.dual_level():
        made = function(torch.autograd.forward_ad.make_dual(x, x), weight.detach())
        assert torch.autograd.forward_ad.unpack_dual(made).tangent is not None


class Two(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(torch.relu(self.one(x)))


class ByName(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, bias=self.bias)


def test_a_bias_that_is_given_by_name():
    torch.manual_seed(0)
    base = ByName(32, 48)
    with torch.no_grad():
        base.bias.fill_(100)
    ours, plain = amp_graph.convert(copy.deepcopy(base), "bf16"), amp_graph.convert(base, PLAIN)
    assert all(map(torch.equal, gradients(ours), gradients(plain)))
    assert text(ours).count("linear_of_parameters(") == 1


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_two_read_are_cast_once_for_both(tied):
    torch.manual_seed(0)
    base = Two(tied)
    ours, plain = amp_graph.convert(copy.deepcopy(base), "bf16"), amp_graph.convert(base, PLAIN)
    assert all(map(torch.equal, gradients(ours), gradients(plain)))
    assert text(ours).count("linear_of_parameters(") == (0 if tied else 2)


def test_large_weights_have_a_way_of_their_own(monkeypatch):
    monkeypatch.setattr(fuse_casts_into_linears, "LARGE", 1)
    model = net()
    gradients(model)
    assert "linear_of_parameters(" not in text(model)


def test_copies_can_be_left_out():
    model = net("bf16,weight_copies=false")
    gradients(model)
    assert "linear_of_parameters(" not in text(model)


def test_a_deep_copy_has_copies_of_its_own():
    model = net()
    gradients(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.neg_()
    assert not torch.equal(gradients(other)[0], gradients(model)[0])
    assert conversion_of(other).copies is not conversion_of(model).copies


def test_the_report_counts_the_casts_inside():
    pair = net(), net(PLAIN)
    for model in pair:
        gradients(model)
    ours, plain = (amp_graph.report(model).graphs[0].casts for model in pair)
    assert sorted((c.source, c.of, c.to, c.kept) for c in ours) == sorted((c.source, c.of, c.to, c.kept) for c in plain)

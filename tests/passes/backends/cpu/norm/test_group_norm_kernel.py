"""Group norms of channels_last images: torch's forward bit for bit, and gradients as exact as torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.norm import group_norm_kernel
from amp_graph.passes.backends.cpu.norm.group_norm_kernel import group_norm_low
from amp_graph.passes.backends.cpu.norm.lower_group_norm import LowerGroupNorm
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native import jit_compiler
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.profitability import conv_thresholds, thresholds
from tests.passes.graphs import BF16, capture_function, passes_before, run_step

pytestmark = pytest.mark.compiled

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(conv_thresholds, "FEWEST_OF_A_GROUP_NORM", 1)
    for module in (thresholds, conv_thresholds):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: True)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SHAPES = {"plain": ((2, 32, 12, 13), 8), "one group": ((3, 24, 5, 4), 1), "a channel each": ((2, 21, 6, 6), 21)}


def step(function, shape, groups, dtype, like=None):
    """Result, and gradients of input, weight and bias."""
    like = like or dtype
    x = drawn(*shape, seed=1).add(0.5).to(like).to(dtype).contiguous(memory_format=LAST).requires_grad_()
    full = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = ((drawn(shape[1], seed=i) + i).to(full).requires_grad_() for i in (2, 3))
    out = function(x, groups, weight, bias, 1e-5)
    grad = drawn(*shape, seed=5).to(like).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), grad)]


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("low", [BF16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_torchs_and_gradients_are_as_exact(name, low):
    shape, groups = SHAPES[name]
    mine, other = step(group_norm_low, shape, groups, low), step(F.group_norm, shape, groups, low)
    exact = step(F.group_norm, shape, groups, torch.float64, low)
    assert torch.equal(mine[0], other[0])
    assert mine[1].is_contiguous(memory_format=LAST)
    for got, torch_got, true in zip(mine[1:], other[1:], exact[1:], strict=True):
        assert (got.dtype, got.shape) == (torch_got.dtype, torch_got.shape)
        assert error(got, true) <= 1.05 * error(torch_got, true) + 1e-5


def test_control_groups_that_are_not_those_of_the_forward_are_seen():
    shape, groups = SHAPES["plain"]
    exact = step(F.group_norm, shape, groups, torch.float64, BF16)
    assert error(step(group_norm_low, shape, 2 * groups, BF16)[1], exact[1]) > 0.01


def test_the_same_bits_with_several_threads(monkeypatch):
    one = step(group_norm_low, *SHAPES["one group"], BF16)
    monkeypatch.setattr(group_norm_kernel, "threads_for", lambda elements: 3)
    assert all(torch.equal(a, b) for a, b in zip(step(group_norm_low, *SHAPES["one group"], BF16), one, strict=True))


def test_second_derivatives_are_as_exact():
    def penalty(function, dtype):
        x = drawn(2, 8, 4, 5, seed=1).bfloat16().to(dtype).contiguous(memory_format=LAST).requires_grad_()
        full = torch.float64 if dtype == torch.float64 else torch.float32
        weight, bias = (drawn(8, seed=i).to(full).requires_grad_() for i in (2, 3))
        first = torch.autograd.grad(function(x, 4, weight, bias, 1e-5).sin().sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    exact = penalty(F.group_norm, torch.float64)
    for a, b, true in zip(penalty(group_norm_low, BF16), penalty(F.group_norm, BF16), exact, strict=True):
        assert error(a, true) <= 1.1 * error(b, true) + 1e-3


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_what_nobody_wants_is_not_returned(wanted):
    x = drawn(2, 8, 4, 4).bfloat16().contiguous(memory_format=LAST)
    given = [t.requires_grad_(i in wanted) for i, t in enumerate((x, drawn(8), drawn(8)))]
    group_norm_low(given[0], 4, *given[1:], 1e-5).float().square().sum().backward()
    assert [t.grad is not None for t in given] == [i in wanted for i in range(3)]


def test_the_operators_fake_is_truthful():
    x = drawn(2, 8, 4, 4).bfloat16().contiguous(memory_format=LAST)
    mean, invstd = drawn(2, 4), drawn(2, 4).abs()
    for wants_x in (True, False):
        torch.library.opcheck(OPS.group_norm_backward.default, (x, x, drawn(8), mean, invstd, 4, wants_x))


class Net(nn.Module):
    """As diffusion models have them: norm, SiLU, convolution."""

    def __init__(self, affine=True):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 5, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16, affine=affine)

    def forward(self, x):
        return self.b(F.silu(self.norm(self.a(x))))


X = drawn(2, 3, 8, 8, seed=1)


def passed(model):
    graph = capture_function(lambda s, x: model(x), X)
    plain, mine = (graph.through(passes_before(LowerGroupNorm))[0] for _ in range(2))
    (done,) = run_passes(mine, [LowerGroupNorm()], checked=True)
    return plain, mine, graph.given, done.result


def test_norms_that_train_are_replaced():
    plain, mine, given, result = passed(Net())
    assert len(result.changes) == 1
    a, b = run_step(mine, given), run_step(plain, given)
    assert torch.equal(a.outputs[0], b.outputs[0])


def test_what_is_left_alone_says_why(monkeypatch):
    *_, result = passed(Net(affine=False))
    assert ["no weight and bias" in skip.reason for skip in result.skips] == [True]
    monkeypatch.setattr(conv_thresholds, "FEWEST_OF_A_GROUP_NORM", 1 << 30)
    *_, result = passed(Net())
    assert ["as fast" in skip.reason for skip in result.skips] == [True]
    monkeypatch.setattr(conv_thresholds, "FEWEST_OF_A_GROUP_NORM", 1)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(jit_compiler.FOLDER, "/nonexistent")
    group_norm_kernel.library.cache_clear()
    jit_compiler.load.cache_clear()
    *_, result = passed(Net())
    group_norm_kernel.library.cache_clear()
    jit_compiler.load.cache_clear()
    assert "compiling for this CPU" in result.skips[0].reason


@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast,recompute=all", "bf16-O2"])
def test_a_converted_model_trains_as_without_and_so_does_a_step(policy):
    def grads(policy):
        torch.manual_seed(0)
        model = amp_graph.convert(Net(), policy)
        model(X).square().mean().backward()
        return [p.grad for p in model.parameters()], conversion_of(model).graphs[0].rewritten.gm.code

    mine, text = grads(policy)
    plain, without = grads(f"{policy},skip=lower_group_norm")
    assert "group_norm_low" in text
    assert "group_norm_low" not in without
    for a, b in zip(mine, plain, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-6
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = amp_graph.TrainStep(model, lambda y: y.square().mean(), optimizer, policy)
    assert torch.isfinite(step(X))
    assert "group_norm_backward" in step.graph_text()

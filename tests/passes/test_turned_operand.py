"""Operands that are turned beforehand: the same numbers, rows that lie in memory, and products rounded as well."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes import native_code, small_linears, train_linears, turn_operands, turned_operand, what_pays
from amp_graph.passes.linear_low import linear_trained
from amp_graph.passes.manager import run_passes
from amp_graph.passes.operators import OPS
from amp_graph.passes.torch_private import make_fx
from amp_graph.passes.turn_operands import TurnOperands
from amp_graph.passes.turned_operand import turned
from tests.passes.builds import memory_that_is_not_zero  # noqa: F401

BF16, FP16 = torch.bfloat16, torch.float16
ATEN = torch.ops.aten

pytestmark = pytest.mark.skipif(turned_operand.library() is None, reason="needs a C compiler")


def bits(rows, columns, seed=0):
    """Any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator).to(torch.int16).view(BF16)


def same(one, other):
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


SHAPES = [(1, 1), (7, 9), (32, 8), (33, 65), (31, 64), (64, 7), (100, 300), (256, 64), (130, 129)]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_there(shape, threads, monkeypatch):
    monkeypatch.setattr(turned_operand, "threads_for", lambda count: threads)
    found = turned(bits(*shape).t())
    same(found, bits(*shape).t())
    assert found.stride(1) == 1
    assert found.stride(0) >= shape[0]
    assert shape[0] < 256 or found.stride(0) % 256, "rows that far apart share places of the caches"


@pytest.mark.parametrize("instructions", ["AVX2", "DEFAULT"])
def test_by_any_instructions(instructions, monkeypatch):
    if instructions == "AVX2" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a CPU without AVX2")
    argtypes = turned_operand.library().transpose.argtypes
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    found = native_code._loaded(turned_operand.SOURCE, ())
    found.transpose.argtypes = argtypes
    monkeypatch.setattr(turned_operand, "library", lambda: found)
    same(turned(bits(77, 131).t()), bits(77, 131).t())


OTHERS = {
    "a part": bits(64, 96)[:, 5:70].t(),
    "fp16": bits(40, 50).view(FP16).t(),
    "rows already": bits(40, 50),
    "gaps": bits(80, 100)[::2, ::2].t(),
    "expanded": bits(1, 50).expand(40, 50).t(),
    "fp32": torch.randn(40, 50).t(),
    "nothing": bits(0, 8).t(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_lies_otherwise(name):
    found = turned(OTHERS[name])
    assert torch.equal(found.nan_to_num(), OTHERS[name].nan_to_num())
    assert found.stride(1) == 1


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(turned_operand, "library", lambda: None)
    same(turned(bits(33, 65).t()), bits(33, 65).t())


def test_its_fake_lies_as_it_does():
    with torch._subclasses.FakeTensorMode() as mode:
        fake = turned(mode.from_tensor(bits(256, 40)).t())
    assert fake.stride() == turned(bits(256, 40).t()).stride()


# -- linears under autograd ---------------------------------------------------------------------------------------


@pytest.fixture
def it_always_pays(monkeypatch):
    for module in (turned_operand, train_linears, turn_operands):
        monkeypatch.setattr(module, "turning_pays", lambda device, dtype, *sizes: dtype == BF16)
    monkeypatch.setattr(small_linears, "small_linear_pays", lambda *form: False)


def errors(weight_gradient, x, grad):
    exact = grad.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    return float((weight_gradient.double() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("it_always_pays")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(96, 64), (3, 5, 40), (40,)], ids=str)
def test_gradients_are_as_near_as_torchs(shape, biased):
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(50, shape[-1]).to(BF16).requires_grad_()
    bias, grad = torch.randn(50).to(BF16).requires_grad_() if biased else None, torch.randn(*shape[:-1], 50).to(BF16)
    wanted = [t for t in (x, weight, bias) if t is not None]
    ours, theirs = (torch.autograd.grad(f(x, weight, bias), wanted, grad) for f in (linear_trained, F.linear))
    assert torch.equal(ours[0], theirs[0])
    rows = (x.detach().view(-1, shape[-1]), grad.view(-1, 50))
    assert errors(ours[1], *rows) <= 1.02 * errors(theirs[1], *rows) + 1e-6
    assert not biased or torch.equal(ours[2], theirs[2])


@pytest.mark.usefixtures("it_always_pays")
def test_control_a_gradient_that_is_not_turned_is_found_out(monkeypatch):
    monkeypatch.setattr(turned_operand, "turned", lambda a: a.contiguous().view(-1).view(a.shape[::-1]).t())
    x, weight = torch.randn(64, 64).to(BF16), torch.randn(64, 64).to(BF16).requires_grad_()
    grad = torch.randn(64, 64).to(BF16)
    (found,) = torch.autograd.grad(linear_trained(x, weight), weight, grad)
    assert errors(found, x, grad) > 0.1


@pytest.mark.usefixtures("it_always_pays")
def test_every_mode_of_autograd():
    x, weight = torch.randn(6, 32).to(BF16).requires_grad_(), torch.randn(48, 32).to(BF16).requires_grad_()
    grad = torch.randn(6, 48).to(BF16)

    def second(function, x, weight, grad):
        first = torch.autograd.grad(function(x, weight), (x, weight), grad, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), (x, weight))

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    for one, true in zip(second(linear_trained, x, weight, grad), second(F.linear, *wide, grad.double()), strict=True):
        assert (one - true).norm() <= 0.02 * true.norm()
    many = torch.stack([grad, -grad])
    (together,) = torch.autograd.grad(linear_trained(x, weight), weight, many, is_grads_batched=True)
    torch.testing.assert_close(together[1], -together[0])


# -- flat graphs --------------------------------------------------------------------------------------------------


def passed(function, *given):
    plain, ours = (make_fx(function, tracing_mode="fake")(*given) for _ in range(2))
    (done,) = run_passes(ours, [TurnOperands()], checked=True)
    return plain, ours, [c.action for c in done.result.changes]


G, X = torch.randn(24, 40).to(BF16), torch.randn(24, 32).to(BF16)


@pytest.mark.usefixtures("it_always_pays")
def test_one_copy_serves_all_products():
    plain, ours, actions = passed(lambda g, x: (torch.mm(t := g.t(), x), torch.mm(t, x * 2), t.sum()), G, X)
    assert actions == ["turned", "turned"]
    assert sum(n.target is OPS.turned_operand.default for n in ours.graph.nodes) == 1
    for one, other in zip(ours(G, X), plain(G, X), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-2)


LEFT = {
    "in rows": (torch.mm, (G.t().contiguous(), X)),
    "fp32": (lambda g, x: torch.mm(g.t(), x), (G.float(), X.float())),
    "two transposed": (lambda g, x: torch.mm(g.t(), x.t()), (G, torch.randn(32, 24).to(BF16))),
    "gaps": (lambda g, x: torch.mm(g[:, ::2].t(), x), (G, X)),
    "one row": (lambda g, x: torch.mm(g[:, :1].t(), x), (G, X)),
}


@pytest.mark.usefixtures("it_always_pays")
@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_alone(name):
    function, given = LEFT[name]
    assert not passed(function, *given)[2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("it_always_pays")
@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_a_step_trains_as_the_loop(compile):
    torch.manual_seed(0)
    base, x = Net(), torch.randn(24, 32)
    losses = {}
    for policy in ("bf16", "bf16,skip=turn_operands"):
        model = copy.deepcopy(base)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = amp_graph.TrainStep(model, F.mse_loss, optimizer, policy, compile=compile)
        losses[policy] = torch.stack([step(x, x) for _ in range(3)])
        if compile == "eager":
            assert ("turned_operand" in step.graph_text()) == ("skip" not in policy)
    torch.testing.assert_close(*losses.values(), rtol=2**-8, atol=0)
    loop = amp_graph.convert(copy.deepcopy(base), "bf16")
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    for expected in losses["bf16"]:
        optimizer.zero_grad()
        loss = F.mse_loss(loop(x), x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.detach(), expected, rtol=0 if compile == "eager" else 2**-7, atol=0)
    assert "linear_trained" in amp_graph.report(loop).graphs[0].text


def test_sizes_that_pay(monkeypatch):
    pays = what_pays.turning_pays
    monkeypatch.setattr(what_pays, "cpu_has_amx", lambda: True)
    assert pays("cpu", BF16, 1024, 768, 768)
    assert pays("cpu", BF16, 1568, 384, 1536)
    assert pays("cpu", BF16, 784, 256, 2304), "wide: patches"
    assert not pays("cpu", BF16, 1024, 1024, 256)
    assert not pays("cpu", BF16, 256, 768, 768)
    assert not pays("cpu", torch.float32, 1024, 768, 768)
    assert not pays("cuda", BF16, 1024, 768, 768)
    monkeypatch.setattr(what_pays, "cpu_has_amx", lambda: False)
    assert not pays("cpu", BF16, 1024, 768, 768), "not timed"

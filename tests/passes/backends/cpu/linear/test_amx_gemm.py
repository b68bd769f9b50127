"""Products by matrix units: of any size and layout, rounded once; and which functions and passes call them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear import amx_gemm as kernel
from amp_graph.passes.backends.cpu.linear import (
    lower_linears,
    lower_weight_gradients,
    panel_gemm,
)
from amp_graph.passes.backends.cpu.linear.amx_gemm import amx_product, amx_product_and_sums, gradients_of_linear
from amp_graph.passes.backends.cpu.linear.lower_linears import linear_low
from amp_graph.passes.backends.cpu.linear.lower_weight_gradients import LowerWeightGradients
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.kernel_table import typed
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import make_fx
from tests.by_hand import descend
from tests.layers import layers
from tests.passes.builds import assert_rounded_once, built, memory_that_is_not_zero  # noqa: F401
from tests.passes.drawn import drawn_low as drawn
from tests.passes.whole_steps import stepped

BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(panel_gemm.library() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(params=["matrix units", "emulated units"], autouse=True)
def _built_for(request, monkeypatch):
    found = typed(built(kernel.SOURCE, request.param), kernel.FUNCTIONS)
    for module in (kernel, lower_weight_gradients):
        monkeypatch.setattr(module, "library", lambda: found)


# rows, columns, depth: around what is multiplied (32 x 32 by 32), waits (128 rows) and is laid out (384 columns,
# 256 and 2,048 of the depth) at a time
SIZES = [
    (1, 1, 1), (16, 16, 32), (32, 32, 64), (33, 65, 97), (31, 1, 255), (1, 100, 256), (100, 33, 257), (130, 385, 31),
    (129, 400, 513), (300, 770, 300), (257, 31, 1000), (47, 500, 5), (5, 3, 6145),
    pytest.param((290, 390, 8200), marks=pytest.mark.slow),  # emulated, 12 s
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_and_order_of_memory(size, biased):
    rows, columns, depth = size
    a, b, bias = drawn(rows, depth), drawn(depth, columns, seed=1), drawn(columns, seed=2) if biased else None
    found = amx_product(a, b, bias)
    assert_rounded_once(found, a, b, bias)
    for one in (a, a.t().contiguous().t()):
        assert all(torch.equal(amx_product(one, other, bias), found) for other in (b, b.t().contiguous().t()))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_of_what_a_product_reads_anyway(size, threads, monkeypatch):
    monkeypatch.setattr(kernel, "threads_at_once", lambda count: threads)
    rows, columns, depth = size
    a, b = drawn(depth, rows), drawn(depth, columns, seed=1)
    product, sums = amx_product_and_sums(a, b)
    assert torch.equal(product, amx_product(a.t(), b))
    exact, sizes = a.double().sum(0), a.double().abs().sum(0)
    assert sums.dtype == BF16
    assert ((sums.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * depth * 2**-24).all()
    for other in (a.t().contiguous().t(), torch.cat([a, a], 1)[:, :rows]):
        again, more = amx_product_and_sums(other, b)
        assert torch.equal(again, product)
        assert ((more - sums).abs().double() <= sums.abs() * 2**-7 + sizes * 1e-5).all()
    with pytest.raises(AssertionError):  # control
        torch.testing.assert_close(sums, a[1:].sum(0), rtol=2**-7, atol=1e-6)


def test_any_bias():
    a, b = drawn(40, 50), drawn(50, 70, seed=1)
    for bias in (drawn(1), drawn(140)[::2], drawn(1).expand(70)):
        assert_rounded_once(amx_product(a, b, bias), a, b, bias)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [(300, 770, 300), (770, 300, 300), (5, 40, 9000)], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_give_the_same_bits(size, threads, monkeypatch):
    a, b = drawn(size[0], size[2]), drawn(size[2], size[1], seed=1)
    alone = amx_product(a, b)
    monkeypatch.setattr(kernel, "threads_at_once", lambda count: threads)
    assert torch.equal(amx_product(a, b), alone)


LAYOUTS = {
    "a part": (drawn(64, 96)[3:50, 5:70], drawn(80, 90)[7:72, 2:60]),
    "a part in columns": (drawn(96, 64)[5:70, 3:50].t(), drawn(90, 80)[2:60, 7:72].t()),
    "gaps": (drawn(80, 100)[::2, ::2], drawn(100, 60)[::2, ::2]),
    "one row for all": (drawn(1, 40).expand(50, 40), drawn(40, 70)),
    "one column for all": (drawn(50, 40), drawn(40, 1).expand(40, 70)),
    "one number": (drawn(1, 1).expand(50, 40), drawn(1, 1).expand(40, 70)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_lies_otherwise(name):
    a, b = LAYOUTS[name]
    found = amx_product(a, b)
    assert_rounded_once(found, a, b)
    assert torch.equal(found, amx_product(a.contiguous(), b.contiguous()))


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_nothing(shape):
    a, b = drawn(shape[0], shape[2]), drawn(shape[2], shape[1])
    assert torch.equal(amx_product(a, b), a @ b)


def test_nan_and_infinity_reach_their_row_and_column_alone():
    a, b = drawn(70, 50), drawn(50, 90, seed=1)
    a[3, 4], b[7, 8] = torch.nan, torch.inf
    found, theirs = amx_product(a, b), a.float() @ b.float()
    assert torch.equal(found.isnan(), theirs.isnan())
    assert torch.equal(found.isinf(), theirs.isinf())
    assert torch.equal(amx_product(a[:1] * 0 + 3e38, b[:, :1] * 0 + 3e38).isinf(), torch.tensor([[True]]))


def test_control_what_is_wrong_is_found_out():
    a, b = drawn(64, 300), drawn(300, 70, seed=1)
    bias = drawn(70, seed=2)
    parts = amx_product(a[:, :150], b[:150]) + amx_product(a[:, 150:], b[150:], bias)
    wrong = (amx_product(a.roll(1, 0), b, bias), amx_product(a, b.roll(1, 1), bias), amx_product(a, b), parts)
    for found in wrong:
        with pytest.raises(AssertionError):
            assert_rounded_once(found, a, b, bias)


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(kernel, "library", lambda: None)
    a, b = drawn(64, 96), drawn(96, 70)
    assert torch.equal(amx_product(a, b), a @ b)
    product, sums = gradients_of_linear(a.t(), b, biased=True)
    assert torch.equal(product, a @ b)
    assert torch.equal(sums, a.sum(1))


def test_no_memory_is_said(monkeypatch):
    class Full:
        @staticmethod
        def product(_):
            return 1

    monkeypatch.setattr(kernel, "library", Full)
    with pytest.raises(MemoryError, match="a product of 64 x 96 by 96 x 70"):
        amx_product(drawn(64, 96), drawn(96, 70))


def test_oneDNN_finds_its_own_tiles_afterwards():
    a, b = drawn(128, 256), drawn(256, 128, seed=1)
    before = a @ b
    for _ in range(3):
        amx_product(a, b)
        assert torch.equal(a @ b, before)


# -- under autograd -----------------------------------------------------------------------------------------------


@pytest.fixture
def it_is_always_profitable(monkeypatch):
    for module in (kernel, lower_weight_gradients):
        monkeypatch.setattr(module, "amx_product_is_profitable", lambda device, dtype, *sizes: dtype == BF16)
    monkeypatch.setattr(lower_linears, "small_linear_is_profitable", lambda *form: False)
    monkeypatch.setattr(lower_linears, "MOST_OF_A_CALL", 0)


def errors(weight_gradient, x, grad):
    exact = grad.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
    return float((weight_gradient.double() - exact).norm() / exact.norm())


def linear_operands(shape, biased):
    """Input, weight, bias and the result's gradient of a linear of 50 outputs."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(50, shape[-1]).to(BF16).requires_grad_()
    bias, grad = torch.randn(50).to(BF16).requires_grad_() if biased else None, torch.randn(*shape[:-1], 50).to(BF16)
    return x, weight, bias, grad


@pytest.mark.usefixtures("it_is_always_profitable")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(96, 64), (3, 5, 40), (40,)], ids=str)
def test_gradients_are_as_near_as_torchs(shape, biased):
    x, weight, bias, grad = linear_operands(shape, biased)
    wanted = [t for t in (x, weight, bias) if t is not None]
    ours, theirs = (torch.autograd.grad(f(x, weight, bias), wanted, grad) for f in (linear_low, F.linear))
    torch.testing.assert_close(ours[0], theirs[0], rtol=2**-7, atol=2**-5)
    assert [g.dtype for g in ours] == [BF16] * len(wanted), "of what is bf16"
    rows = (x.detach().view(-1, shape[-1]), grad.view(-1, 50))
    assert errors(ours[1], *rows) <= 1.02 * errors(theirs[1], *rows) + 1e-6
    if biased:
        assert (ours[2] - grad.view(-1, 50).double().sum(0)).abs().max() <= 0.05
        torch.testing.assert_close(ours[2], theirs[2], rtol=2**-7, atol=2**-7)


# -- flat graphs --------------------------------------------------------------------------------------------------


def passed(function, *given):
    plain, ours = (make_fx(function, tracing_mode="fake")(*given) for _ in range(2))
    (done,) = run_passes(ours, [LowerWeightGradients()], checked=True)
    return plain, ours, [c.action for c in done.result.changes]


G, X = torch.randn(24, 40).to(BF16), torch.randn(24, 32).to(BF16)


@pytest.mark.usefixtures("it_is_always_profitable")
def test_products_of_a_flat_graph():
    plain, ours, actions = passed(lambda g, x: (torch.mm(t := g.t(), x), torch.mm(t, x * 2), t.sum()), G, X)
    assert actions == ["own kernel", "own kernel"]
    assert sum(n.target is OPS.amx_product.default for n in ours.graph.nodes) == 2
    torch.testing.assert_close(list(ours(G, X)), list(plain(G, X)), rtol=2**-7, atol=1e-2)


def with_bias(g, x):
    return torch.mm(g.t(), x), g.sum(0), g.sum(0, keepdim=True), g.sum(1), torch.mm(g.t(), x * 2)


@pytest.mark.usefixtures("it_is_always_profitable")
def test_sums_of_a_flat_graph():
    """One with each product; what adds up otherwise, or before it, is torch's."""
    plain, ours, _ = passed(with_bias, G, X)
    targets = [n.target for n in ours.graph.nodes]
    assert targets.count(OPS.amx_product_and_sums.default) == 1
    assert targets.count(OPS.amx_product.default) == 1
    torch.testing.assert_close(list(ours(G, X)), list(plain(G, X)), rtol=2**-7, atol=1e-2)
    for first in (lambda g, x: (g.sum(0), torch.mm(g.t(), x)), lambda g, x: (torch.mm(g.t(), x), (g * 2).sum(0))):
        assert OPS.amx_product.default in [n.target for n in passed(first, G, X)[1].graph.nodes]


LEFT = {
    "in rows": (torch.mm, (G.t().contiguous(), X)),
    "fp32": (lambda g, x: torch.mm(g.t(), x), (G.float(), X.float())),
    "two transposed": (lambda g, x: torch.mm(g.t(), x.t()), (G, torch.randn(32, 24).to(BF16))),
    "gaps": (lambda g, x: torch.mm(g[:, ::2].t(), x), (G, X)),
    "one row": (lambda g, x: torch.mm(g[:, :1].t(), x), (G, X)),
}


@pytest.mark.usefixtures("it_is_always_profitable")
@pytest.mark.parametrize("name", LEFT)
def test_all_else_is_left_alone(name):
    function, given = LEFT[name]
    assert not passed(function, *given)[2]


@layers(lambda: dict(first=nn.Linear(32, 64), second=nn.Linear(64, 32, bias=False)), seed=0)
def Net(self, x):
    return self.second(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("it_is_always_profitable")
@pytest.mark.parametrize("compile", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_trains_as_the_loop(compile):
    x = torch.randn(24, 32)
    policies = ("bf16", "bf16,skip=lower_weight_gradients")
    ours, plain = (stepped(Net, F.mse_loss, [(x, x)] * 3, policy, compile=compile) for policy in policies)
    if compile == "eager":
        assert ("amx_product" in ours.text, "amx_product" in plain.text) == (True, False)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=2**-8, atol=0)
    loop = amp_graph.convert(Net(), "bf16")
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    for expected in ours.losses:
        loss = descend(optimizer, F.mse_loss(loop(x), x))
        torch.testing.assert_close(loss.detach(), expected, rtol=2**-7, atol=0)


@pytest.fixture
def a_thread_idles(monkeypatch):
    monkeypatch.setattr(lower_weight_gradients, "one_of_two_threads_idles", lambda device, dtype, *sizes: dtype == BF16)


@pytest.mark.usefixtures("it_is_always_profitable", "a_thread_idles")
def test_a_step_leaves_no_thread_idle():
    x = torch.randn(24, 32)
    policies = ("bf16", "bf16,skip=lower_weight_gradients|lower_linears")
    ours, plain = (stepped(Net, F.mse_loss, [(x, x)] * 3, policy) for policy in policies)
    assert not [name for name in ("aten.mm.", "aten.addmm.") if name in ours.text]
    torch.testing.assert_close(ours.losses, plain.losses, rtol=2**-7, atol=0)

"""Linears that train over few rows: gradients rounded once, in every mode of autograd; only where it pays."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.cpu.linear import amx_gemm
from amp_graph.passes.backends.cpu.linear import lower_linears as low
from amp_graph.passes.backends.cpu.linear import panel_gemm as kernel
from amp_graph.passes.backends.cpu.linear.lower_linears import LowerLinears, linear_low
from amp_graph.passes.casts.low_layer_norm import Fp32NormGradients
from amp_graph.passes.manager import run_passes
from tests.by_hand import descend, step_of
from tests.layers import layers
from tests.passes.builds import every_build, memory_that_is_not_zero  # noqa: F401
from tests.passes.drawn import differentiated
from tests.passes.drawn import drawn_low as drawn
from tests.passes.graphs import BF16, Function, capture_function, passes_until

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")


SHAPES = [((2, 32), 33), ((5, 64), 32), ((16, 96), 130), ((31, 33), 40), ((32, 256), 64), ((3, 7, 40), 50), ((40,), 36)]


def operands(shape, outputs, biased=True):
    given = [drawn(*shape), drawn(outputs, shape[-1], seed=1), *([drawn(outputs, seed=2)] if biased else [])]
    return [t.requires_grad_() for t in given], drawn(*shape[:-1], outputs, seed=3)


def check(found, given, grad):
    """Each within a rounding to bf16 of what fp64 gives, and what fp32 sums of so many may be off."""
    exact = differentiated(F.linear, given, torch.float64, grad=grad)
    sizes = differentiated(F.linear, [t.abs() for t in given], torch.float64, grad=grad.abs())
    for one, true, size in zip(found, exact, sizes, strict=True):
        assert one.dtype == BF16
        assert one.shape == true.shape
        assert ((one.double() - true).abs() <= true.abs() * 2**-8 + size * 300 * 2**-24).all()


@pytest.mark.usefixtures("every_build")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
def test_results_and_gradients_are_rounded_once(shape, outputs, biased):
    given, grad = operands(shape, outputs, biased)
    check(differentiated(linear_low, given, grad=grad), given, grad)


@pytest.mark.parametrize("wrong", ["the weight turned", "rows rolled", "rounded twice"])
def test_control_what_is_wrong_is_found_out(wrong, monkeypatch):
    plain = low.product_low

    def broken(a, b, bias=None):
        if wrong == "rounded twice":
            made = plain(a, b)
            return made if bias is None else made + bias
        if wrong == "rows rolled" and bias is None:
            return plain(a, b).roll(1, 0)
        return plain(a, b.t() if wrong == "the weight turned" and b.shape[0] == b.shape[1] else b, bias)

    monkeypatch.setattr(low, "product_low", broken)
    given, grad = operands((64, 64), 64)
    with pytest.raises(AssertionError):
        check(differentiated(linear_low, given, grad=grad), given, grad)


LAYOUTS = {
    "transposed": drawn(48, 16).t(),
    "expanded": drawn(1, 48).expand(16, 48),
    "strided": drawn(16, 96)[:, ::2],
}


@pytest.mark.usefixtures("every_build")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout(layout):
    given, _ = operands((16, 64), 48)
    check(differentiated(linear_low, given, grad=LAYOUTS[layout]), given, LAYOUTS[layout])


def test_gradients_that_nobody_needs_are_not_computed(monkeypatch):
    counted = []
    plain = low.product_low
    monkeypatch.setattr(amx_gemm, "library", lambda: None)
    monkeypatch.setattr(low, "product_low", lambda *args: counted.append(len(args)) or plain(*args))
    (x, weight, bias), grad = operands((8, 64), 48)
    linear_low(x.detach(), weight, bias).backward(grad)
    assert len(counted) == 2  # the result, and the gradient of the weight
    with torch.no_grad():
        linear_low(x, weight, bias)
    assert len(counted) == 3


# -- the pass -----------------------------------------------------------------------------------------------


def through(function, *inputs, **state):
    gm, _ = capture_function(function, *inputs, **state).through(passes_until(Fp32NormGradients))
    (done,) = run_passes(gm, [LowerLinears()], checked=True)
    return gm, done.result


W, B = nn.Parameter(torch.randn(64, 64) / 8), nn.Parameter(torch.randn(64))


@pytest.mark.parametrize(("rows", "small"), [(8, True), (1, False), (1 << 13, False)])
def test_only_where_it_pays(rows, small):
    gm, _ = through(lambda m, x: F.linear(x, m.w, m.b), torch.randn(rows, 64), w=W, b=B)
    assert any(n.target is linear_low for n in gm.graph.nodes) == small


def test_what_needs_no_gradient_is_left_to_packing():
    with torch.no_grad():
        assert not through(lambda m, x: F.linear(x, m.w, m.b), torch.randn(8, 64), w=W, b=B)[1].modified


def with_bias(of):
    """Return a model whose second linear has the bias that ``of`` makes of the first one's result and parameters."""

    def forward(m, x):
        h = F.linear(x, m.w, m.b)
        return F.linear(h, m.w, of(m, h))

    return forward


BIASES = {
    "one for all": lambda m, h: m.b[:1],
    "a scalar": lambda m, h: m.b[0],
    "expanded": lambda m, h: m.b[:1].expand(64),
    "a row for each": lambda m, h: h * 2,
    "the input itself": lambda m, h: h,
    "strided": lambda m, h: F.linear(h, m.w).view(-1, 64, 2)[0, :, 0],
    "a row of results expanded": lambda m, h: h[0, :1].expand(64),
}


def check_like_torchs_kernels(function, x):
    exact = step_of(Function(function, w=W, b=B), x)
    policies = ("bf16", "bf16,skip=lower_linears")
    given = [step_of(amp_graph.convert(Function(function, w=W, b=B), p), x) for p in policies]
    for true, one, theirs in zip(exact, *given, strict=True):
        assert one.shape == true.shape
        assert (one - true).norm() <= 1.1 * (theirs - true).norm()
        assert (theirs - true).norm() <= 0.02 * true.norm()


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_is_broadcast_as_torch_does_it(bias):
    check_like_torchs_kernels(with_bias(BIASES[bias]), drawn(32, 64).float())


EDITS = {
    "relu": lambda y: y.relu_(),
    "sum": lambda y: y.add_(1),
    "row": lambda y: y.index_fill_(0, torch.tensor([0]), 0.5),
    "columns": lambda y: (y[..., :32].mul_(2), y)[1],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(32, 64), (4, 8, 64)], ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_results_may_be_written_in_place(edit, shape):
    check_like_torchs_kernels(
        lambda m, x: F.linear(EDITS[edit](F.linear(x, m.w, m.b)), m.w, m.b), drawn(*shape).float()
    )


@layers(lambda: dict(first=nn.Linear(32, 64), second=nn.Linear(64, 64, bias=False), third=nn.Linear(64, 32)))
def Net(self, x):
    return self.third(F.gelu(self.second(torch.relu(self.first(x)))))


X = torch.randn(24, 32, generator=torch.Generator().manual_seed(5))


def test_a_step_has_the_bits_of_the_loop():
    base = Net()
    loop, whole = amp_graph.convert(copy.deepcopy(base), "bf16"), copy.deepcopy(base)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1, momentum=0.9)
    step = amp_graph.TrainStep(whole, F.mse_loss, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), "bf16")
    for turn in range(4):
        loss = descend(optimizer, F.mse_loss(loop(X + turn), X))
        assert torch.equal(step(X + turn, X), loss)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), loop.parameters(), strict=True))

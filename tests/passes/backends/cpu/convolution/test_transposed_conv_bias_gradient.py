"""Transposed convolutions with a bias: torch's forward and gradients bit for bit, but for the bias', by a sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.convolution.conv_functions import conv_transpose_low
from amp_graph.passes.backends.cpu.convolution.transposed_conv_bias_gradient import TransposedConvBiasGradient
from amp_graph.passes.manager import run_passes
from amp_graph.passes.profitability import conv_thresholds, thresholds
from amp_graph.passes.profitability.conv_thresholds import bias_gradient_by_sum_is_profitable
from tests.passes.graphs import BF16, capture_function, passes_before, run_step

TORCHS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    for module in (thresholds, conv_thresholds):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: True)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Places, kernel, stride, padding, output padding, groups, dilation.
FORMS = {
    "doubled": ((8, 6), (2, 2), (2, 2), (0, 0), (0, 0), 1, (1, 1)),
    "overlapping": ((8, 6), (4, 4), (2, 2), (1, 1), (0, 0), 1, (1, 1)),
    "uneven": ((5, 7), (3, 2), (2, 3), (1, 0), (1, 2), 1, (1, 1)),
    "groups and dilation": ((6, 6), (3, 3), (1, 1), (2, 2), (0, 0), 2, (2, 2)),
    "sequence": ((32,), (4,), (2,), (1,), (0,), 1, (1,)),
    "volume": ((4, 5, 6), (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 0, 1), 1, (1, 1, 1)),
}


def step(function, form, dtype, last=False):
    places, kernel, *how, groups, dilation = FORMS[form]
    x = drawn(4, 6, *places, seed=1).to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    w, b = drawn(6, 8 // groups, *kernel, seed=2) / 4, drawn(8, seed=3)
    given = [t.to(dtype).requires_grad_() for t in (x, w, b)]
    out = function(*given, *how, groups, dilation)
    return [out.detach(), *torch.autograd.grad(out, given, drawn(*out.shape, seed=5).to(dtype))]


def torchs(form):
    return TORCHS[len(FORMS[form][0]) - 1]


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("form", "last"), [(form, last) for form in FORMS for last in {False, len(FORMS[form][0]) == 2}]
)
def test_only_the_bias_gradient_is_computed_otherwise_and_as_exactly(form, last):
    kernel, ours = step(torchs(form), form, BF16, last), step(conv_transpose_low, form, BF16, last)
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], kernel[:3], strict=True))
    exact = step(torchs(form), form, torch.float64, last)
    assert error(ours[3], exact[3]) <= 1.1 * error(kernel[3], exact[3])


@pytest.mark.parametrize("form", FORMS)
def test_in_fp64_it_is_the_gradient(form):
    for a, b in zip(
        step(conv_transpose_low, form, torch.float64), step(torchs(form), form, torch.float64), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form):
    def penalty(function):
        places, kernel, *how, groups, dilation = FORMS[form]
        given = [drawn(2, 6, *places, seed=1), drawn(6, 8 // groups, *kernel, seed=2), drawn(8, seed=3)]
        given = [t.double().requires_grad_() for t in given]
        out = function(*given, *how, groups, dilation).sin().sum()
        first = torch.autograd.grad(out, given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    for a, b in zip(penalty(conv_transpose_low), penalty(torchs(form)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_what_nobody_wants_is_not_computed(wanted, monkeypatch):
    given = [drawn(2, 4, 5, 5, seed=1), drawn(4, 3, 2, 2, seed=2), drawn(3, seed=3)]
    given = [t.bfloat16().requires_grad_(i in wanted) for i, t in enumerate(given)]
    how = ((2, 2), (0, 0), (0, 0), 1, (1, 1))
    conv_transpose_low(*given, *how).sum().backward()
    assert [t.grad is not None for t in given] == [i in wanted for i in range(3)]


STATE = {"w": drawn(6, 8, 2, 2, seed=2) / 4, "b": drawn(8, seed=3)}
X = drawn(4, 6, 8, 8, seed=1)


def passed(function, policy="bf16", **state):
    graph = capture_function(function, X, **(STATE | state))
    plain, ours = (graph.through(passes_before(TransposedConvBiasGradient, policy))[0] for _ in range(2))
    (done,) = run_passes(ours, [TransposedConvBiasGradient()], checked=True)
    return plain, ours, graph.given, done.result


@pytest.mark.parametrize(
    "function",
    [
        lambda s, x: F.conv_transpose2d(x, s.w, s.b, 2),
        lambda s, x: torch.conv_transpose2d(x, s.w, bias=s.b, stride=(2, 1), output_padding=(1, 0)),
        lambda s, x: torch.ops.aten.conv_transpose2d(x, s.w, s.b, [2]),
    ],
)
def test_however_it_is_called_only_the_bias_gradient_differs(function):
    plain, ours, given, result = passed(function)
    assert len(result.changes) == 1
    a, b = run_step(ours, given), run_step(plain, given)
    assert torch.equal(a.outputs[0], b.outputs[0])
    for mine, kernels in zip(a.grads, b.grads, strict=True):
        assert (mine is None) == (kernels is None)
        if mine is not None:
            assert (mine - kernels).norm() <= 0.005 * kernels.norm()


def test_control_a_sum_over_too_few_places_is_seen(monkeypatch):
    real = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t, *dims: real(t[..., 1:], *dims) if dims else real(t))
    exact = step(torchs("doubled"), "doubled", torch.float64)
    assert error(step(conv_transpose_low, "doubled", BF16)[3], exact[3]) > 0.1


LEFT_ALONE = {
    "no bias": (lambda s, x: F.conv_transpose2d(x, s.w, None, 2), 1),
    "a bias without a gradient": (lambda s, x: F.conv_transpose2d(x, s.w, s.b.detach(), 2), 1),
    "no batch": (lambda s, x: F.conv_transpose2d(x[0], s.w, s.b, 2), 1),
    "no training": (lambda s, x: F.conv_transpose2d(x, s.w.detach(), s.b.detach(), 2) + s.b.view(-1, 1, 1), 0),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    function, skips = LEFT_ALONE[name]
    _, ours, _, result = passed(function)
    assert not any(n.target is conv_transpose_low for n in ours.graph.nodes)
    assert len(result.skips) == skips


def test_the_rule():
    assert bias_gradient_by_sum_is_profitable("cpu", BF16)
    assert not bias_gradient_by_sum_is_profitable("cpu", torch.float16)
    assert not bias_gradient_by_sum_is_profitable("cuda", BF16)


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.c = nn.ConvTranspose2d(8, 6, 2, 2), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.norm(self.a(x))))))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "bf16,recompute=all", "bf16-O2"])
@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
def test_a_converted_model_trains_as_without(compile, policy):
    x = drawn(2, 3, 8, 8)

    def grads(policy):
        torch.manual_seed(0)
        model = amp_graph.convert(Up(), policy, compile=compile)
        model(x).square().mean().backward()
        text = conversion_of(model).graphs[0].rewritten.gm.code if compile == "eager" else ""
        return [p.grad for p in model.parameters()], text

    ours, text = grads(policy)
    plain, without = grads(f"{policy},skip=transposed_conv_bias_gradient")
    assert compile != "eager" or ("conv_transpose_low" in text and "conv_transpose_low" not in without)
    for a, b in zip(ours, plain, strict=True):
        assert a.stride() == b.stride()
        assert (a - b).norm() <= 0.01 * b.norm() + 1e-6


def test_a_step_as_one_graph_asks_the_kernel_for_no_bias():
    model = Up()
    step = amp_graph.TrainStep(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), 0.1), "bf16")
    assert torch.isfinite(step(drawn(2, 3, 8, 8)))
    transposed = [
        line for line in step.graph_text().splitlines() if "convolution_backward" in line and "True, [0, 0]" in line
    ]
    assert len(transposed) == 1
    assert "False]" in transposed[0]

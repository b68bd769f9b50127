"""Convolutions of small images: torch's forward bit for bit, and a weight gradient as exact as the kernel's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.convolution import conv_functions
from amp_graph.passes.backends.cpu.convolution.conv_functions import conv2d_low, weight_gradient
from amp_graph.passes.backends.cpu.convolution.conv_weight_gradient import Convolution
from amp_graph.passes.manager import run_passes
from amp_graph.passes.profitability import conv_thresholds, thresholds
from amp_graph.passes.profitability.conv_thresholds import weight_gradient_by_product_is_profitable
from tests.passes.graphs import BF16, capture_function, passes_before, run_step


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    for module in (thresholds, conv_thresholds):
        monkeypatch.setattr(module, "multiplies_bf16", lambda: True)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Kernel, stride, padding: each with its own height and width.
FORMS = {
    "1x1": ((1, 1), (1, 1), (0, 0)),
    "1x1 strided": ((1, 1), (2, 2), (0, 0)),
    "3x3": ((3, 3), (1, 1), (1, 1)),
    "3x3 strided": ((3, 3), (2, 2), (1, 1)),
    "whole image": ((5, 7), (1, 1), (0, 0)),
    "uneven": ((3, 2), (2, 1), (0, 1)),
    "stride that leaves a rest": ((2, 2), (3, 4), (1, 0)),
}


def step(function, form, dtype, last=True):
    kernel, stride, padding = FORMS[form]
    layout = torch.channels_last if last else torch.contiguous_format
    x = drawn(4, 6, 5, 7, seed=1).to(dtype).contiguous(memory_format=layout).requires_grad_()
    w, b = ((drawn(*shape, seed=2) / 4).to(dtype).requires_grad_() for shape in ((8, 6, *kernel), (8,)))
    out = function(x, w, b, stride, padding)
    return [out.detach(), *torch.autograd.grad(out, (x, w, b), drawn(*out.shape, seed=5).to(dtype))]


def errors(got, exact):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.multiplied
def test_only_the_weights_gradient_is_computed_otherwise_and_as_exactly(form, last):
    kernel, ours = step(F.conv2d, form, BF16, last), step(conv2d_low, form, BF16, last)
    assert [torch.equal(a, b) for a, b in zip(ours, kernel, strict=True)][::2] == [True, True]
    assert torch.equal(ours[3], kernel[3])
    assert ours[2].shape == kernel[2].shape
    exact = step(F.conv2d, form, torch.float64, last)
    assert errors(ours, exact)[2] <= 1.1 * errors(kernel, exact)[2]


@pytest.mark.parametrize("form", FORMS)
def test_in_fp64_it_is_the_gradient(form):
    for a, b in zip(step(conv2d_low, form, torch.float64), step(F.conv2d, form, torch.float64), strict=True):
        torch.testing.assert_close(a, b)


def test_control_a_forgotten_padding_is_seen(monkeypatch):
    patches = conv_functions._patches
    shifted = lambda x, kernel, stride, padding: patches(x.roll(1, 2), kernel, stride, padding)  # noqa: E731
    monkeypatch.setattr(conv_functions, "_patches", shifted)
    exact = step(F.conv2d, "3x3", torch.float64)
    assert errors(step(conv2d_low, "3x3", BF16), exact)[2] > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form):
    kernel, stride, padding = FORMS[form]

    def penalty(function):
        x = drawn(2, 3, 5, 7, seed=1).double().requires_grad_()
        w = drawn(4, 3, *kernel, seed=2).double().requires_grad_()
        out = function(x, w, None, stride, padding).sin().sum()
        first = torch.autograd.grad(out, (x, w), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))

    for a, b in zip(penalty(conv2d_low), penalty(F.conv2d), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_lies_where_the_kernels_does():
    x, w = (t.contiguous(memory_format=torch.channels_last) for t in (drawn(2, 32, 4, 4), drawn(16, 32, 3, 3)))
    x, w = x.bfloat16(), w.bfloat16()
    grad = drawn(2, 16, 4, 4).bfloat16().contiguous(memory_format=torch.channels_last)
    how = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    expected = torch.ops.aten.convolution_backward(grad, x, w, *how)[1]
    assert weight_gradient(grad, x, w, (1, 1), (1, 1), False).stride() == expected.stride()


def convs(s, x):
    return F.conv2d(F.relu(F.conv2d(x, s.w, s.b, stride=2, padding=1)), s.v, padding=1)


X = drawn(4, 32, 8, 8, seed=1)
STATE = {"w": drawn(32, 32, 3, 3, seed=2) / 16, "v": drawn(32, 32, 3, 3, seed=3) / 16, "b": drawn(32, seed=4)}


def passed(function, x=X, policy="bf16", **state):
    graph = capture_function(function, x, **(STATE | state))
    plain, ours = (graph.through(passes_before(Convolution, policy))[0] for _ in range(2))
    (done,) = run_passes(ours, [Convolution()], checked=True)
    return plain, ours, graph.given, done.result


def test_both_convolutions_are_replaced_and_only_weights_gradients_differ():
    plain, ours, given, result = passed(convs)
    assert len(result.changes) == 2
    assert sum(n.target is conv2d_low for n in ours.graph.nodes) == 2
    a, b = run_step(ours, given), run_step(plain, given)
    assert torch.equal(a.outputs[0], b.outputs[0])
    for mine, kernels in zip(a.grads, b.grads, strict=True):
        assert (mine is None) == (kernels is None)
        if mine is not None:
            assert (mine - kernels).norm() <= 0.005 * kernels.norm()


def test_named_padding_is_read_as_numbers():
    _, ours, _, result = passed(lambda s, x: F.conv2d(F.conv2d(x, s.w, padding="same"), s.v, padding="valid"), FEW)
    assert [n.args[4] for n in ours.graph.nodes if n.target is conv2d_low] == [(1, 1), (0, 0)]
    assert len(result.changes) == 2


def frozen(s, x):
    return F.conv2d(x + s.b.view(1, -1, 1, 1), s.w.detach(), stride=2, padding=1)


FEW = X[:, :, :4, :4]
LEFT_ALONE = {
    "groups": (lambda s, x: F.conv2d(F.conv2d(x, s.w[:, :1], groups=32, padding=1), s.v[:, :1], groups=32), FEW),
    "dilation": (lambda s, x: F.conv2d(F.conv2d(x, s.w, padding=2, dilation=2), s.v, padding=2, dilation=2), FEW),
    "many places": (lambda s, x: F.conv2d(F.conv2d(x, s.w, padding=1), s.v, padding=1), X),
    "no gradient": (lambda s, x: frozen(s, frozen(s, x)), X),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    function, x = LEFT_ALONE[name]
    _, ours, _, result = passed(function, x)
    assert not any(n.target is conv2d_low for n in ours.graph.nodes)
    assert len(result.skips) == 2


def test_the_rule(monkeypatch):
    assert weight_gradient_by_product_is_profitable("cpu", BF16, 64, 9, False, 16)
    assert weight_gradient_by_product_is_profitable("cpu", BF16, 64, 9, True, 49)
    for units in (True, False):
        monkeypatch.setattr(conv_thresholds, "cpu_has_amx", lambda units=units: units)
        assert weight_gradient_by_product_is_profitable("cpu", BF16, 128, 9, False, 49) is units
        assert not weight_gradient_by_product_is_profitable("cpu", BF16, 64, 9, False, 49)
    assert not weight_gradient_by_product_is_profitable("cpu", BF16, 16, 9, False, 16)
    assert not weight_gradient_by_product_is_profitable("cuda", BF16, 64, 9, False, 16)
    assert not weight_gradient_by_product_is_profitable("cpu", torch.float16, 64, 9, False, 16)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(32, 32, 3, 2, 1), nn.Conv2d(32, 48, 1)
        self.norm, self.head = nn.BatchNorm2d(48), nn.Linear(48, 5)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.b(F.relu(self.a(x))))).mean((2, 3)))


@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
@pytest.mark.multiplied
def test_a_converted_model_trains_as_without(compile):
    def grads(policy):
        torch.manual_seed(0)
        model = amp_graph.convert(Small(), policy, compile=compile)
        F.cross_entropy(model(X), torch.arange(4)).backward()
        text = conversion_of(model).graphs[0].rewritten.gm.code if compile == "eager" else ""
        return [p.grad for p in model.parameters()], text

    ours, text = grads("bf16")
    plain, without = grads("bf16,skip=convolution")
    assert compile != "eager" or ("conv2d_low" in text and "conv2d_low" not in without)
    for a, b in zip(ours, plain, strict=True):
        assert a.stride() == b.stride()
        assert (a - b).norm() <= 0.01 * b.norm() + 1e-6


def test_a_step_as_one_graph_multiplies_patches():
    model = Small()
    step = amp_graph.TrainStep(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), fused=True), "bf16")
    assert torch.isfinite(step(X, torch.arange(4)))
    assert step.graph_text().count("unfold") == 2  # the 1 x 1 convolution is a product as a whole

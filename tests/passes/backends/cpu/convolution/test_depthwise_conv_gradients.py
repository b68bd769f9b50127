"""Depthwise convolutions: torch's forward bit for bit, and gradients by compiled C as exact as the kernel's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.convolution import conv_functions
from amp_graph.passes.backends.cpu.convolution.conv_functions import depthwise_low, depthwise_rows
from amp_graph.passes.backends.cpu.convolution.depthwise_conv_gradients import (
    Depthwise,
)
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.builds import no_compiler  # noqa: F401
from tests.passes.drawn import differentiated, drawn
from tests.passes.graphs import BF16, Function, assert_near, capture_function, multiply_bf16, run_step, with_and_without
from tests.relative_error import assert_as_exact, error, errors

LAST = torch.channels_last


# Channels, height and width, kernel, stride, padding.
FORMS = {
    "7x7": (32, (9, 8), (7, 7), (1, 1), (3, 3)),
    "5x5 strided": (16, (11, 10), (5, 5), (2, 2), (2, 2)),
    "3x3 strided": (40, (8, 7), (3, 3), (2, 2), (1, 1)),
    "a rest of channels": (21, (6, 6), (5, 5), (1, 1), (2, 2)),
    "few channels": (3, (9, 9), (4, 4), (3, 3), (0, 0)),
    "uneven": (24, (10, 13), (2, 9), (1, 2), (1, 4)),
    "strides over rows and places": (20, (13, 12), (2, 2), (4, 3), (0, 1)),
    "larger than its images": (18, (3, 4), (11, 9), (1, 1), (5, 4)),
    "one place": (17, (6, 5), (1, 1), (2, 2), (0, 0)),
    "whole image": (16, (5, 6), (5, 6), (1, 1), (0, 0)),
}


def torchs(x, w, b, stride, padding):
    return F.conv2d(x, w, b, stride, padding, 1, x.shape[1])


def ours(x, w, b, stride, padding):
    return depthwise_low(x, w, b, stride, padding, True, True)


def given_of(form, dtype, images=2):
    channels, size, kernel, *how = FORMS[form]
    x = drawn(images, channels, *size, seed=1).to(dtype).contiguous(memory_format=LAST)
    w, b = (drawn(channels, 1, *kernel, seed=2) / 4).to(dtype), drawn(channels, seed=3).to(dtype)
    return [t.requires_grad_() for t in (x, w, b)], how


def step(function, form, dtype, like=None):
    """Result, and gradients of input, weight and bias, from numbers of precision ``like``."""
    given, how = given_of(form, like or dtype)
    return differentiated(lambda *leaves: function(*leaves, *how), given, dtype, like=like)


@pytest.mark.parametrize("low", [BF16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.compiled
def test_forward_is_torchs_and_gradients_are_as_exact(form, low):
    mine, other, exact = step(ours, form, low), step(torchs, form, low), step(torchs, form, torch.float64, low)
    assert torch.equal(mine[0], other[0])
    assert mine[1].is_contiguous(memory_format=LAST)
    assert_as_exact(mine[1:], other[1:], exact[1:])


@pytest.mark.parametrize("broken", ["padding", "stride"])
@pytest.mark.compiled
def test_control_a_kernel_in_another_place_is_seen(broken, monkeypatch):
    real = conv_functions._table
    at = {"padding": -6, "stride": -8}[broken]  # of the first number, from the end

    def table(*given, **kwargs):
        made = real(*given, **kwargs)
        made[at - 1] += 1
        return made

    monkeypatch.setattr(conv_functions, "_table", table)
    mine, exact = step(ours, "5x5 strided", BF16), step(torchs, "5x5 strided", torch.float64, BF16)
    assert max(error(a, b) for a, b in zip(mine[1:3], exact[1:3], strict=True)) > 0.1


@pytest.mark.parametrize("form", ["7x7", "5x5 strided", "a rest of channels"])
@pytest.mark.compiled
def test_the_same_bits_with_several_threads(form, monkeypatch):
    one = step(ours, form, BF16)
    monkeypatch.setattr(conv_functions, "threads_for", lambda elements: 3)
    assert all(torch.equal(a, b) for a, b in zip(step(ours, form, BF16), one, strict=True))


# -- the pass ---------------------------------------------------------------------------------------------


@pytest.fixture
def pays(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)


def block(kernel=7, stride=1, padding=3, **kwargs):
    def function(s, x):
        h = F.conv2d(x, s.w, padding=1)
        h = F.conv2d(h, getattr(s, f"v{kernel}"), s.b, stride, padding, groups=32, **kwargs)
        return F.conv2d(h, s.u)

    return function


# Length, kernel, stride, padding.
SEQUENCES = {
    "31": (40, 31, 1, 15),
    "4 from before": (24, 4, 1, 3),
    "strided": (30, 5, 3, 2),
    "same": (20, 15, 1, "same"),
    "valid": (20, 13, 2, "valid"),
}


def sequence(form):
    """A function, and its input."""
    length, kernel, stride, padding = SEQUENCES[form]

    def function(s, x):
        h = F.conv1d(x.relu(), getattr(s, f"r{kernel}"), s.c, stride, padding, groups=24)
        return F.conv1d(h, s.d).flatten(1), h.view(-1)

    return function, drawn(2, 24, length, seed=1)


X = drawn(2, 4, 10, 10, seed=1)
STATE = {"w": drawn(32, 4, 3, 3, seed=2) / 6, "u": drawn(8, 32, 1, 1, seed=4) / 6, "b": drawn(32, seed=5)}
STATE |= {f"v{k}": drawn(32, 1, k, k, seed=3) / k for k in (3, 4, 5, 7)}
STATE |= {f"r{k}": drawn(24, 1, k, seed=3) / k for _, k, *_ in SEQUENCES.values()}
STATE |= {"c": drawn(24, seed=5), "d": drawn(8, 24, 1, seed=4) / 5}


def passed(function, x=X):
    return with_and_without(Depthwise(), capture_function(function, x, **STATE))


def own(graph):
    return [n for n in graph.graph.nodes if n.target in (depthwise_low, depthwise_rows)]


TAKEN = {
    "7x7": (block(), X, (True, False)),
    "5x5 strided": (block(5, 2, 2), X, (True, True)),
    "3x3 strided": (block(3, 2, 1), X, (False, True)),
    "same": (block(5, 1, "same"), X, (True, False)),
    "valid": (block(4, 1, "valid"), X, (True, False)),
    **{f"sequence, {form}": (*sequence(form), None) for form in SEQUENCES},  # an image that is one place high
}


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.compiled
def test_those_that_pay_are_replaced(name):
    function, x, gradients = TAKEN[name]
    plain, mine, given, result = passed(function, x)
    assert len(result.changes) == 1
    (node,) = own(mine)
    assert gradients is None or node.args[-2:] == gradients
    a, b = run_step(mine, given), run_step(plain, given)
    assert_near(a, b, 0.01)
    assert gradients is None or torch.equal(a.outputs[0], b.outputs[0])
    pairs = [] if gradients else zip(a.outputs + a.grads, b.outputs + b.grads, strict=True)
    assert all(one is None or one.dim() == 1 or one.stride() == other.stride() for one, other in pairs)


LEFT_ALONE = {
    "3x3": (block(3, 1, 1), "optimized gradients"),
    "dilation": (block(5, 1, 4, dilation=2), None),
    "no gradient": (lambda s, x: F.conv2d(F.conv2d(x, s.w).detach(), s.v7.detach(), s.b.detach(), groups=32), None),
}


@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    function, reason = LEFT_ALONE[name]
    _, mine, _, result = passed(function)
    assert not result.changes
    assert not own(mine)
    assert [reason in skip.reason for skip in result.skips] == [True] * (reason is not None)


@pytest.mark.usefixtures("pays", "no_compiler")
def test_without_a_compiler_torchs_stay():
    *_, result = passed(block())
    assert "compiling for this CPU" in result.skips[0].reason


@pytest.mark.usefixtures("pays")
@pytest.mark.compiled
def test_sequences_without_gradients_are_images_where_the_kernel_is_long():
    for form, wanted in {"31": 1, "4 from before": 0}.items():
        function, x = sequence(form)
        model = amp_graph.convert(Function(function, **STATE), "bf16")
        with torch.no_grad():
            found = model(x)
        assert len(own(conversion_of(model).graphs[0].rewritten.gm)) == wanted
        assert max(errors(found, Function(function, **STATE)(x))) <= 0.02


@layers(
    lambda: dict(
        stem=nn.Conv2d(3, 24, 3),
        a=nn.Conv2d(24, 24, 7, padding=3, groups=24),
        b=nn.Conv2d(24, 24, 3, 2, 1, groups=24, bias=False),
        norm=nn.BatchNorm2d(24),
        head=nn.Conv2d(24, 5, 1),
    ),
    seed=0,
)
def Mixer(self, x):
    """As ConvNeXt and MobileNet have them."""
    h = F.relu(self.norm(self.b(F.gelu(self.a(self.stem(x))))))
    return self.head(h).mean((2, 3))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("pays")
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast,recompute=all", "bf16-O2"])
@pytest.mark.parametrize("compile", ["eager", "aot_eager"])
@pytest.mark.compiled
def test_a_converted_model_trains_as_without(compile, policy):
    x = drawn(2, 3, 12, 12)

    def grads(policy):
        model = amp_graph.convert(Mixer(), policy, compile=compile)
        _, *found = step_of(model, x, loss=lambda out: out.square().mean())
        return found, conversion_of(model).graphs[0].rewritten.gm.code if compile == "eager" else ""

    mine, text = grads(policy)
    plain, without = grads(f"{policy},skip=depthwise")
    assert compile != "eager" or (text.count("depthwise_low") >= 2 and "depthwise_low" not in without)
    for a, b in zip(mine, plain, strict=True):
        assert a.is_contiguous()
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-6

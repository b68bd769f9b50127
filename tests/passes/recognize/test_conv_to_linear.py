"""Convolutions whose kernel covers the image are linears: the same sums, and weights that are read as they lie."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.graph.identify_ops import IdentifyOps
from amp_graph.passes.layout.conv_args import convolution_call
from amp_graph.passes.recognize import conv_to_linear
from amp_graph.passes.recognize.conv_to_linear import ConvToLinear
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    Function,
    assert_left_alone,
    assert_near,
    capture_function,
    options,
    run_step,
    with_and_without,
)

LAST = torch.channels_last


X = drawn(3, 4, 5, 6, seed=1)
W, B = drawn(7, 4, 5, 6, seed=2) / 8, drawn(7, seed=3)

PATCHES = drawn(4, 3, 16, 16, seed=4) / 30

COVER = {
    "with a bias": lambda s, x: F.conv2d(x, s.w, s.b),
    "without": lambda s, x: F.conv2d(x, s.w),
    "with a stride": lambda s, x: F.conv2d(x, s.w, s.b, stride=2),
    "padding in words": lambda s, x: F.conv2d(x, s.w, s.b, padding="valid"),
    "written behind": lambda s, x: F.conv2d(x, s.w, s.b).relu_().mul(2),
    "of channels_last images": lambda s, x: F.conv2d(x.contiguous(memory_format=LAST), s.w, s.b),
}
OTHERS = {
    "two places": lambda s, x: F.conv2d(F.pad(x, (0, 1)), s.w),
    "padding": lambda s, x: F.conv2d(x, s.w, padding=1),
    "groups": lambda s, x: F.conv2d(x, s.w[:, :2].repeat(2, 1, 1, 1), groups=2),
    "one place in all": lambda s, x: F.conv2d(x[:, :, :1, :1], s.w[:, :, :1, :1]),
    "one image": lambda s, x: F.conv2d(x[0], s.w),
}


def passed(function, x=X, **state):
    graph = capture_function(function, x.clone().requires_grad_(), **{"w": W, "b": B} | state)
    return with_and_without(ConvToLinear(options()), graph, behind=[IdentifyOps()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COVER)
@pytest.mark.parametrize("weight", [W, W.contiguous(memory_format=LAST)])
def test_it_is_the_convolution(name, weight):
    plain, ours, given, result = passed(COVER[name], w=weight)
    assert len(result.changes) == 1
    assert_near(run_step(ours, given), run_step(plain, given), 1e-5)


def test_control_images_whose_elements_come_in_another_order(monkeypatch):
    monkeypatch.setattr(conv_to_linear, "describe", _wrongly(conv_to_linear.describe, iter([True, False])))
    plain, ours, given, _ = passed(COVER["without"])
    assert not torch.allclose(ours(*given)[0], plain(*given)[0], rtol=1e-2)


def _wrongly(describe, orders):
    """Turn the images alone, not the weight."""

    def described(made, like, mode):
        if made.target == "flatten" and next(orders):
            with made.graph.inserting_before(made):
                turned = made.graph.call_method("transpose", (made.args[0], -2, -1))
            made.args = (describe(turned, like, mode), *made.args[1:])
        return describe(made, like, mode)

    return described


@pytest.mark.parametrize("name", OTHERS)
def test_what_stays(name):
    assert_left_alone(passed(OTHERS[name]))


def test_images_whose_size_varies_are_left_alone():
    model = amp_graph.convert(Function(lambda s, x: F.conv2d(x, s.w[:, :, : x.shape[2]]), w=W), "bf16", dynamic=True)
    assert all(model(drawn(3, 4, height, 6)).shape == (3, 7, 1, 1) for height in (5, 4, 3))


@layers(
    lambda norm=False: dict(
        conv=nn.Conv2d(4, 8, 3),
        head=nn.Conv2d(8, 16, 4),
        last=nn.Conv2d(16, 5, 1),
        norm=nn.BatchNorm2d(16) if norm else nn.Identity(),
    ),
    seed=0,
)
def Head(self, x):
    """The end of VGG: images of one place behind a convolution that covers them."""
    return self.last(self.norm(self.head(self.conv(x).relu())).relu()).flatten(1)


def trained_as_exactly_as_by_autocast(kind, x):
    """Return the converted model, autocast's result and the exact one; their gradients are compared with fp64's."""
    model = amp_graph.convert(kind(), "bf16")
    out, *theirs = step_of(kind(), x, context=torch.autocast("cpu", torch.bfloat16))
    right, *exact = step_of(kind().double(), x.double(), loss=lambda out: out.square().sum())
    _, *found = [step_of(model, x) for _ in range(2)][1]
    for ours, other, known in zip(found, theirs, exact, strict=True):
        assert (ours - known).norm() <= 1.1 * (other - known).norm() + 1e-6
    return model, out, right


def test_the_weight_is_rounded_once_an_update_and_its_gradient_is_as_exact_as_autocasts():
    model, *_ = trained_as_exactly_as_by_autocast(Head, drawn(6, 4, 6, 6))
    assert model.head.weight.grad.stride() == model.head.weight.stride()
    assert "linear" in conversion_of(model).graphs[0].rewritten.gm.code


def test_norms_are_folded_rather():
    model = amp_graph.freeze(amp_graph.convert(Head(norm=True).eval(), "bf16"))
    with torch.no_grad():
        model(drawn(6, 4, 6, 6))
    done = {p.name: p.result for p in conversion_of(model).graphs[0].rewritten.passes}
    assert not done["conv-to-linear"].changes


P = drawn(2, 3, 8, 12, seed=4)
WP, BP = drawn(10, 3, 4, 4, seed=5) / 7, drawn(10, seed=6)

IN_ROWS = {
    "flattened": lambda s, x: torch.cat([s.t, F.conv2d(x, s.w, s.b, 4).flatten(2).transpose(1, 2)], 1),
    "viewed": lambda s, x: F.layer_norm(F.conv2d(x, s.w, s.b, 4).view(2, 10, 6).transpose(1, 2), (10,)),
    "for a linear": lambda s, x: F.linear(F.conv2d(x, s.w, None, (4, 4)).reshape(2, 10, -1).transpose(2, 1), s.v),
}
AS_IMAGES = {
    "read by others too": lambda s, x: ((h := F.conv2d(x, s.w, s.b, 4)).flatten(2).transpose(1, 2) * 2, h.sum((2, 3))),
    "viewed across": lambda s, x: F.conv2d(x, s.w, s.b, 4).view(2, -1) * 2,
    "rows that go back": lambda s, x: F.conv2d(x, s.w, s.b, 4).flatten(2).transpose(1, 2).transpose(1, 2).view(2, -1),
    "added to": lambda s, x: F.conv2d(x, s.w, s.b, 4).flatten(2).transpose(1, 2) + s.t,
    "written behind": lambda s, x: F.conv2d(x, s.w, s.b, 4).relu_().mul(2),
    "of what needs a gradient": lambda s, x: F.conv2d(x * 2, s.w, s.b, 4).flatten(2).flatten(1),
}
APART = {
    "overlapping": lambda s, x: F.conv2d(x, s.w, stride=3),
    "with gaps": lambda s, x: F.conv2d(x, s.w, stride=5),
    "a rest": lambda s, x: F.conv2d(x[:, :, :7], s.w, stride=4),
    "padded": lambda s, x: F.conv2d(x, s.w, stride=4, padding=2),
    "dilated": lambda s, x: F.conv2d(x, s.w[..., :2, :2], stride=2, dilation=2),
    "small patches": lambda s, x: F.linear(F.conv2d(x, s.w[..., :2, :2], stride=2).flatten(2).transpose(1, 2), s.v),
    "an image of small patches": lambda s, x: F.conv2d(x, s.w, stride=4),
    "channels_last": lambda s, x: F.conv2d(x.contiguous(memory_format=LAST), s.w, stride=4),
    "many channels": lambda s, x: F.conv2d(x.repeat(1, 4, 1, 1), s.w.repeat(1, 4, 1, 1), stride=4),
}


STATE = {"w": WP, "b": BP, "t": drawn(2, 1, 10, seed=7), "v": drawn(5, 10, seed=8)}


@pytest.mark.parametrize("name", [*IN_ROWS, *AS_IMAGES])
def test_patches_are_rows(name, monkeypatch):
    monkeypatch.setattr(conv_to_linear, "LEAST_PATCH_OF_AN_IMAGE", 4)
    plain, ours, given, result = passed((IN_ROWS | AS_IMAGES)[name], P, **STATE)
    assert len(result.changes) == 1
    found, expected = run_step(ours, given), run_step(plain, given)
    assert [t.stride() for t in found.outputs] == [t.stride() for t in expected.outputs]
    assert_near(found, expected, 1e-5)
    calls = {n.target for n in ours.graph.nodes}
    assert not any(convolution_call(n) for n in ours.graph.nodes)
    assert ("contiguous" in calls) == (name in AS_IMAGES), "laid out again where somebody may see how it lies"


@pytest.mark.parametrize("name", APART)
def test_other_convolutions_are_no_patches(name, monkeypatch):
    if "image" not in name:
        monkeypatch.setattr(conv_to_linear, "LEAST_PATCH_OF_AN_IMAGE", 4)
    assert_left_alone(passed(APART[name], P, **STATE))


def test_control_patches_that_are_turned_differ(monkeypatch):
    describe = conv_to_linear.describe
    monkeypatch.setattr(conv_to_linear, "LEAST_PATCH_OF_AN_IMAGE", 4)

    def turned(made, like, mode):
        if made.target == "permute" and len(made.args[1]) == 6:
            made.args = (made.args[0], (0, 2, 4, 1, 5, 3))
        return describe(made, like, mode)

    monkeypatch.setattr(conv_to_linear, "describe", turned)
    plain, ours, given, _ = passed(AS_IMAGES["viewed across"], P, **STATE)
    assert not torch.allclose(ours(*given)[0], plain(*given)[0], rtol=1e-2)


@layers(
    lambda: dict(
        patch=nn.Conv2d(3, 64, 4, 4),
        token=nn.Parameter(torch.randn(1, 1, 64)),
        norm=nn.LayerNorm(64),
        last=nn.Linear(64, 5),
    ),
    seed=0,
)
def Transformer(self, x):
    """The begin of a vision transformer."""
    x = self.patch(x).flatten(2).transpose(1, 2)
    return self.last(self.norm(torch.cat([self.token.expand(len(x), -1, -1), x], 1)))


def test_a_vision_transformer_is_as_exact_as_autocasts(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    x = drawn(2, 3, 32, 32)
    model, out, right = trained_as_exactly_as_by_autocast(Transformer, x)
    with torch.no_grad(), amp_graph.frozen(model):
        assert (model(x) - right).norm() <= 1.1 * (out - right).norm()
    assert all("conv2d" not in graph.rewritten.gm.code for graph in conversion_of(model).graphs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 2, 0), (1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_patches_are_read_in_rows_by_a_transpose_alone(order, dynamic):
    """Images, channels and places are 4 each: the shape does not tell which dimensions were swapped."""
    patches = lambda s, x: F.conv2d(x, s.w, None, 16).flatten(2).permute(*order)  # noqa: E731
    model = Function(lambda s, x: torch.cat([part := patches(s, x), part]), w=PATCHES)
    x = drawn(4, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x)
    ours = amp_graph.convert(model, "bf16")
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    assert torch.allclose(ours(x).float(), theirs.float(), atol=2e-2)

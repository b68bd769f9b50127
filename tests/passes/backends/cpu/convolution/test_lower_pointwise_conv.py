"""1 x 1 convolutions as matrix products: the same gradients to the last rounding, in the same layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.convolution import lower_pointwise_conv
from amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv import pointwise_conv
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.passes.graphs import multiply_bf16
from tests.relative_error import assert_as_exact, error

BF16, LAST = torch.bfloat16, torch.channels_last


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)


def run(conv, dtype, stride, size=6, bias=True, exact=False):
    """The output and the gradients of input, weight and bias."""
    x, w = drawn(3, 8, size, size + 1, dtype=dtype).to(memory_format=LAST), drawn(16, 8, 1, 1, dtype=dtype, seed=1)
    given = [x, w, *([drawn(16, dtype=dtype, seed=2)] if bias else [])]
    given = [(t.double() if exact else t).requires_grad_() for t in given]
    out = conv(*given, *([] if bias else [None]), stride)
    grad = drawn(*out.shape, dtype=dtype, seed=3).to(out.dtype).contiguous(memory_format=LAST)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize(("size", "bias"), [(6, True), (5, False), (1, True)])
def test_it_is_the_convolution(few, dtype, stride, size, bias):
    ours = run(lambda *a: pointwise_conv(*a, few), dtype, stride, size, bias)
    torchs = run(F.conv2d, dtype, stride, size, bias)
    assert_as_exact(ours, torchs, run(F.conv2d, dtype, stride, size, bias, exact=True), times=1.1)
    assert ours[0].is_contiguous(memory_format=LAST)
    assert ours[1].is_contiguous(memory_format=LAST)


def test_rows_in_another_order_are_the_control(monkeypatch):
    rows = lower_pointwise_conv.rows
    monkeypatch.setattr(lower_pointwise_conv, "rows", lambda x: rows(x).flip(0))
    exact = run(F.conv2d, BF16, (1, 1), exact=True)
    ours = run(lambda *a: pointwise_conv(*a, True), BF16, (1, 1))
    assert error(ours[0], exact[0]) > 0.1


@pytest.mark.parametrize("few", [True, False])
def test_a_result_may_be_written_in_place(few):
    in_place = run(lambda *a: pointwise_conv(*a, few).relu_(), BF16, (1, 1))
    plain = run(lambda *a: pointwise_conv(*a, few).relu(), BF16, (1, 1))
    assert all(map(torch.equal, in_place, plain))


@layers(
    lambda: dict(
        reduce=nn.Conv2d(16, 8, 1, bias=False),
        conv=nn.Conv2d(8, 8, 3, stride=2, padding=1),
        expand=nn.Conv2d(8, 16, 1),
        short=nn.Conv2d(16, 16, 1, stride=2),
        grouped=nn.Conv2d(16, 16, 1, groups=4),
        padded=nn.Conv2d(16, 16, 1, padding=1),
        norm=nn.BatchNorm2d(8),
        squeeze=nn.Conv2d(16, 16, 1),
    ),
    seed=0,
)
def Bottleneck(self, x):
    """A block of ResNet-50, with the convolutions that the pass leaves alone beside."""
    h = F.relu(self.norm(self.reduce(x)))
    h = F.relu(self.expand(self.conv(h)) + self.short(x))
    h = h * self.squeeze(F.adaptive_avg_pool2d(h, 1)).sigmoid()
    return self.padded(self.grouped(h)).mean((2, 3))


X = drawn(2, 16, 8, 8, seed=4)


def products(model):
    (graph,) = conversion_of(model).graphs
    return [n for n in graph.rewritten.gm.graph.nodes if n.target is pointwise_conv]


def trained(policy, compile="eager"):
    model = amp_graph.convert(Bottleneck(), policy, compile=compile)
    return model, step_of(model, X)


@pytest.mark.parametrize(
    ("policy", "compile", "count"),
    [
        ("bf16", "eager", 4),
        ("bf16,accuracy=fast", "eager", 4),
        ("bf16-O2", "eager", 4),
        ("bf16,skip=lower-pointwise-conv", "eager", 0),
        ("bf16,lists=autocast_cpu", "eager", 0),
        ("fp16", "eager", 0),
        ("bf16", "aot_eager", 0),
    ],
)
def test_where_it_runs(policy, compile, count):
    model, _ = trained(policy, compile)
    assert len(products(model)) == count


@pytest.mark.parametrize("few", [512, 0])
def test_a_block_trains_as_without_it(monkeypatch, few):
    monkeypatch.setattr("amp_graph.passes.backends.cpu.convolution.lower_pointwise_conv.FEW_PLACES", few)
    want = step_of(Bottleneck().double(), X.double(), loss=lambda out: out.square().sum())
    (_, ours), (_, plain) = trained("bf16"), trained("bf16,skip=lower_pointwise_conv")
    assert sum(map(error, ours, want)) <= 1.05 * sum(map(error, plain, want))


@layers(
    lambda: dict(
        conv=nn.Conv2d(16, 16, 3), reduce=nn.Conv2d(16, 4, 1), expand=nn.Conv2d(4, 16, 1), act=nn.SiLU(inplace=True)
    )
)
def SqueezeAndExcite(self, x):
    """As EfficientNet and MobileNet have it: what follows each convolution writes into its result."""
    x = self.act(self.conv(x))
    return x * F.hardsigmoid(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))), inplace=True)


@pytest.mark.multiplied
def test_many_places_without_gradients_are_torchs(monkeypatch):
    monkeypatch.setattr(lower_pointwise_conv, "FEW_PLACES", 0)
    model = amp_graph.convert(Bottleneck().eval(), "bf16")
    with torch.no_grad():
        model(X)
    assert not products(model)
    (graph,) = conversion_of(model).graphs
    assert any("as fast" in s.reason for t in graph.rewritten.passes for s in t.result.skips)


def test_one_image_without_a_batch_is_left_alone():
    model = nn.Sequential(nn.Conv2d(32, 32, 3, 2, 1), nn.Conv2d(32, 48, 1))
    x = drawn(32, 8, 8)
    want = model(x)
    got = amp_graph.convert(model, "bf16", strict=True)(x)
    assert error(got, want.double()) < 0.02
    got.sum().backward()

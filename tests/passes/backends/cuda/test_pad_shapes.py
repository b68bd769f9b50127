"""Products padded for tensor cores: the same numbers, the same gradients, parameters as they were."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cuda import pad_shapes
from amp_graph.passes.backends.cuda.pad_shapes import PadChannels, PadShapes, aligned_conv2d, aligned_linear
from amp_graph.passes.base import PassResult
from amp_graph.passes.manager import run_passes
from tests.layers import layers, words_and_head
from tests.passes.drawn import differentiated, drawn
from tests.passes.graphs import capture_function, differences, options, run_step, standard_passes
from tests.relative_error import assert_as_exact, error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ON_CUDA = options(device="cuda")


@pytest.fixture(autouse=True)
def _however_small(monkeypatch):
    monkeypatch.setattr(pad_shapes, "LEAST_ALIGNED", 1)


gradients = partial(differentiated, seed=9)


LINEARS = [(13, 21), (16, 21), (13, 16), (16, 24), (1, 1)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("sizes", LINEARS)
@pytest.mark.parametrize("dense", [True, False])
def test_a_padded_linear_is_the_linear(dtype, sizes, dense):
    inside, outside = sizes
    given = [t.to(dtype) for t in (drawn(3, 5, inside), drawn(outside, inside, seed=1), drawn(outside, seed=2))]
    ours = gradients(lambda x, w, b: aligned_linear(x, w, b, dense), given, dtype)
    plain, exact = gradients(F.linear, given, dtype), gradients(F.linear, given, torch.float64)
    assert_as_exact(ours, plain, exact, 1.1, 1e-6 if dtype == FP32 else 0.0)
    assert ours[0].stride() == plain[0].stride() or not dense


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("channels", [3, 5, 12])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_padded_convolution_is_the_convolution(dtype, channels, layout):
    given = [t.to(dtype) for t in (drawn(2, channels, 9, 9), drawn(6, channels, 3, 3, seed=1), drawn(6, seed=2))]
    given[0] = given[0].to(memory_format=layout)
    geometry = ([2, 1], [1, 0], [1, 2])
    ours = gradients(lambda x, w, b: aligned_conv2d(x, w, b, *geometry), given, dtype)
    plain, exact = (gradients(lambda *g: F.conv2d(*g, *geometry), given, d) for d in (dtype, torch.float64))
    assert_as_exact(ours, plain, exact, 1.1, 1e-6 if dtype == FP32 else 0.0)
    assert ours[0].stride() == plain[0].stride()


def test_padding_with_ones_is_the_control(monkeypatch):
    given = [drawn(5, 13), drawn(21, 13, seed=1), drawn(21, seed=2)]
    pad = F.pad
    monkeypatch.setattr(pad_shapes.F, "pad", lambda x, sizes: pad(x, sizes, value=1.0))
    ours = gradients(lambda x, w, b: aligned_linear(x, w, b, True), given, FP32)
    monkeypatch.undo()
    assert error(ours[0], gradients(F.linear, given, torch.float64)[0]) > 0.01


W = drawn(21, 13, seed=1)
PADDED = {
    "logits": lambda s, x: F.linear(x, s.w),
    "with a bias": lambda s, x: F.linear(x, s.w, s.w[:, 0]),
    "viewed": lambda s, x: F.linear(x, s.w).view(-1),
    "widened": lambda s, x: F.linear(x, s.w).float().view(-1, 21).softmax(-1),
    "the weight is read twice": lambda s, x: (F.linear(x, s.w), F.linear(x.sin(), s.w)),
}
KEPT = {
    "even sizes": lambda s, x: F.linear(x[..., :8], s.w[:16, :8]),
    "full precision": lambda s, x: F.linear(x.double(), s.w.double()),
    "contiguous images": lambda s, x: F.conv2d(x.view(1, 3, 5, 13), s.w[:9, :9].view(9, 1, 3, 3).expand(-1, 3, -1, -1)),
    "a group a channel": lambda s, x: F.conv2d(x.view(3, 5, 13, 1), s.w[:5, :9].view(5, 1, 3, 3), padding=1, groups=5),
}


def passed(function):
    graph = capture_function(function, drawn(3, 5, 13), w=W)
    plain, ours = (graph.through(standard_passes())[0] for _ in range(2))
    linears, images = run_passes(ours, [PadShapes(ON_CUDA), PadChannels(ON_CUDA)], checked=True)
    changes, skips = linears.result.changes + images.result.changes, linears.result.skips + images.result.skips
    return plain, ours, graph.given, PassResult(ours, changes, skips)


@pytest.mark.parametrize("name", PADDED)
def test_the_pass(name):
    plain, ours, given, result = passed(PADDED[name])
    assert result.changes
    a, b = run_step(ours, given), run_step(plain, given)
    for x, y in zip(a.outputs + a.grads, b.outputs + b.grads, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert error(x, y.double()) <= 2**-8
    (again,) = run_passes(ours, [PadShapes(ON_CUDA)], checked=True)
    assert not again.result.changes


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    plain, ours, given, result = passed(KEPT[name])
    assert not result.changes
    assert not differences(run_step(ours, given), run_step(plain, given))


@layers(lambda: dict(conv=nn.Conv2d(3, 10, 3, padding=1), fc=nn.Linear(10, 13), **words_and_head(27, 13)), seed=0)
def Odd(self, x):
    """A first convolution of three channels, odd widths, and words that 8 does not divide."""
    h = self.fc(F.relu(self.conv(x)).flatten(2).transpose(1, 2))
    logits = self.head(h.sin())
    return F.cross_entropy(logits.view(-1, 27), torch.arange(logits[..., 0].numel()) % 27), logits


X = drawn(2, 3, 6, 6, seed=4).contiguous(memory_format=torch.channels_last)


def step(model, x=X):
    loss, logits = model(x)
    (loss + logits.square().sum()).backward()
    return [loss.detach(), logits.detach(), *(p.grad for p in model.parameters())]


def trained(policy):
    model = Odd()
    keys = [(k, v.shape, v.dtype) for k, v in model.state_dict().items()]
    found = step(amp_graph.convert(model, policy))
    assert [(k, v.shape, v.dtype) for k, v in model.state_dict().items()] == keys
    assert all(p.grad.shape == p.shape for p in model.parameters())
    return model, found


def found_in(model):
    (graph,) = conversion_of(model).graphs
    return [n.target.__name__ for n in graph.rewritten.gm.graph.nodes if n.target in (aligned_linear, aligned_conv2d)]


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ("bf16,device=cuda", 3),
        ("fp16,device=cuda", 3),
        ("bf16,device=cuda,accuracy=fast", 3),
        ("bf16,device=cuda,skip=pad-shapes", 0),
        ("bf16,device=cuda,skip=pad-channels", 2),
        ("bf16,lists=autocast_cuda,device=cuda", 0),
        ("bf16", 0),
    ],
)
def test_where_it_runs_and_that_a_model_trains_as_without_it(policy, count):
    model, ours = trained(policy)
    assert len(found_in(model)) == count
    want = step(Odd().double(), X.double())
    _, plain = trained(policy + ("" if "skip" in policy else ",skip=pad_shapes"))
    assert all(a.stride() == b.stride() for a, b in zip(ours, plain, strict=True))
    assert sum(map(error, ours, want)) <= 1.05 * sum(map(error, plain, want))


@pytest.mark.parametrize(
    ("compile", "options", "padded"),
    [
        ("inductor", {}, ["aligned_conv2d"]),  # Inductor pads no convolutions
        ("inductor", {"shape_padding": False}, ["aligned_conv2d", "aligned_linear", "aligned_linear"]),
        ("aot_eager", {}, ["aligned_conv2d", "aligned_linear", "aligned_linear"]),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_matmuls_that_inductor_pads_are_left_to_it(compile, options, padded, whole, monkeypatch):
    as_it_is = lambda gm, inputs, **how: gm.forward  # noqa: E731
    monkeypatch.setattr("amp_graph.capture.dynamo_backend.compile_with_inductor", as_it_is)
    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda name: as_it_is)
    model, policy = Odd(), "bf16,device=cuda"
    how = {"compile": compile, "options": options}
    if whole:
        step = amp_graph.TrainStep(model, lambda out: out[0], torch.optim.SGD(model.parameters()), policy, **how)
        step(X)
        gm = step.captured[0].rewritten.gm
    else:
        amp_graph.convert(model, policy, **how)(X)
        gm = conversion_of(model).graphs[0].rewritten.gm
    assert [n.target.__name__ for n in gm.graph.nodes if n.target in (aligned_linear, aligned_conv2d)] == padded

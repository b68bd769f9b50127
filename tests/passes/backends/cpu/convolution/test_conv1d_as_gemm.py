"""Convolutions of sequences by products of windows: as fp64 says, for every form; other forms are left alone."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.backends.cpu.convolution import conv1d_as_gemm as module
from amp_graph.passes.backends.cpu.convolution import transpose_kernel
from amp_graph.passes.backends.cpu.convolution.conv1d_as_gemm import conv1d_by_windows
from amp_graph.passes.backends.cpu.convolution.transpose_kernel import turned
from amp_graph.passes.profitability import conv_thresholds

BF16 = torch.bfloat16
# batch, channels, outputs, length, taps, stride, padding
SIZES = [
    (2, 8, 16, 50, 3, 2, 0),
    (3, 5, 7, 41, 10, 5, 0),
    (2, 8, 8, 30, 3, 1, 1),
    (2, 8, 8, 31, 4, 3, 2),
    (1, 8, 8, 31, 2, 4, 0),  # places that no window reads
    (2, 1, 8, 100, 10, 5, 0),
    (2, 8, 8, 33, 1, 1, 0),
    (2, 8, 8, 33, 1, 2, 0),
    (2, 8, 8, 9, 5, 2, 4),
    (2, 64, 48, 300, 3, 2, 1),
]


@pytest.fixture(autouse=True)
def it_is_always_profitable(monkeypatch):
    monkeypatch.setattr(module, "windows_are_profitable", lambda device, dtype, places, weight, trains: device == "cpu")


def operands(size, biased):
    torch.manual_seed(0)
    batch, channels, outputs, length, taps, *_ = size
    x, weight = torch.randn(batch, channels, length), torch.randn(outputs, channels, taps) / (channels * taps) ** 0.5
    return [t.to(BF16) for t in (x, weight, *([torch.randn(outputs)] if biased else []))]


def near(found, wanted, within=2**-8):
    return (found.double() - wanted).norm() <= within * wanted.norm() + 1e-30


def check(size, biased, in_rows, lay=lambda x: x):
    *_, stride, padding = size
    given = operands(size, biased)
    wide = [t.double().requires_grad_() for t in given]
    low = [t.requires_grad_() for t in (lay(given[0]).detach(), *given[1:])]
    wanted = F.conv1d(wide[0], wide[1], wide[2] if biased else None, stride, padding)
    found = conv1d_by_windows(low[0], low[1], low[2] if biased else None, stride, padding, in_rows)
    assert found.shape == wanted.shape
    assert (found if in_rows else found.transpose(1, 2)).is_contiguous()
    assert near(found, wanted)
    grad = torch.randn(wanted.shape).to(BF16)
    found.backward(grad)
    wanted.backward(grad.double())
    for one, other in zip(low, wide, strict=True):
        assert near(one.grad, other.grad)
    assert not near(found.roll(1, 2), wanted), "other places"


@pytest.mark.parametrize("few", [0, 1 << 30], ids=["an item at a time", "at once"])
@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_are_those_of_fp64(size, in_rows, few, monkeypatch):
    monkeypatch.setattr(module, "FEW", few)
    for biased in (True, False):
        check(size, biased, in_rows)


def test_channels_side_by_side_are_read_as_they_lie():
    check(SIZES[0], True, False, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    check(SIZES[3], True, True, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    check(SIZES[0], False, False, lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]])


def test_a_gradient_lies_as_its_input():
    x, weight = operands(SIZES[9], False)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (x, last):
        given = given.detach().requires_grad_()
        conv1d_by_windows(given, weight, None, 2, 1, False).sum().backward()
        assert (given.grad.stride(1) == 1) is (given.stride(1) == 1)


def test_second_derivatives_and_several_gradients():
    *_, stride, padding = SIZES[3]
    given = operands(SIZES[3], True)

    def twice(function, x, *others):
        (grad,) = torch.autograd.grad(function(x, *others, stride, padding).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), others[0])[0]

    wide = [t.double().requires_grad_() for t in given]
    low = [t.clone().requires_grad_() for t in given]
    found = twice(lambda *args: conv1d_by_windows(*args, False), *low)
    assert near(found, twice(F.conv1d, *wide), 2**-5)
    out = conv1d_by_windows(*low, stride, padding, False)
    many = torch.randn(3, *out.shape).to(BF16)
    together = torch.autograd.grad(out, low, many, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(many):
        for one, alone in zip(together, torch.autograd.grad(out, low, grad, retain_graph=True), strict=True):
            assert near(one[i], alone.double(), 2**-7)


def test_transforms():
    x, weight, bias = operands(SIZES[2], True)
    wanted = F.conv1d(x, weight, bias, 1, 1)
    assert torch.equal(torch.vmap(lambda row: conv1d_by_windows(row[None], weight, bias, 1, 1, False)[0])(x), wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 7, 8, 31, 32, 33, 100])
def test_turning_is_exact(rows, threads, monkeypatch):
    monkeypatch.setattr(transpose_kernel, "threads_for", lambda count: threads)
    for items, columns, dtype in itertools.product((1, 3), (1, 8, 15, 32, 70), (BF16, torch.float16)):
        x = torch.randn(items, rows, columns).to(dtype)
        assert torch.equal(turned(x), x.transpose(1, 2))
        assert turned(x).is_contiguous()
    assert not torch.equal(turned(x), x.transpose(1, 2).roll(1, 0)), "other items"


def test_what_is_not_turned_by_ours():
    x = torch.randn(2, 5, 6)
    for one in (x, x.to(BF16).transpose(1, 2), x.to(BF16)[:, ::2], x.to(BF16)[:, :0]):
        assert torch.equal(turned(one), one.transpose(1, 2))
        assert turned(one).is_contiguous()


class Net(nn.Sequential):
    """As in HF's wav2vec2: a norm over the places of a channel behind the first."""

    def __init__(self):
        first = nn.Conv1d(1, 16, 10, 5, bias=False), nn.GroupNorm(16, 16), nn.GELU()
        others = nn.Conv1d(16, 16, 3, 2), nn.GELU(), nn.Conv1d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 8, 1)
        super().__init__(*first, *others)


def calls(model):
    nodes = [n for graph in conversion_of(model).graphs for n in graph.rewritten.gm.graph.nodes]
    return [n for n in nodes if n.target is conv1d_by_windows]


def test_a_model_and_who_reads_rows():
    torch.manual_seed(0)
    base, x = Net(), torch.randn(3, 1, 400)
    wide = copy.deepcopy(base).double()
    wanted = wide(x.double())
    wanted.square().sum().backward()
    found, errors = {}, {}
    for policy in ("bf16,recompute=some", "bf16,recompute=some,skip=conv1d"):
        model = amp_graph.convert(copy.deepcopy(base), policy)
        out = model(x)
        out.square().sum().backward()
        found[policy] = calls(model)
        pairs = zip(model.parameters(), wide.parameters(), strict=True)
        errors[policy] = [((p.grad.double() - q.grad).norm() / q.grad.norm()).item() for p, q in pairs]
    ours, torchs = found.values()
    assert [node.args[5] for node in ours] == [True, False, False, False]
    assert not torchs
    assert all(a <= 1.3 * b for a, b in zip(*errors.values(), strict=True))


OTHERS = {
    "groups": lambda: nn.Conv1d(8, 8, 3, groups=2),
    "dilation": lambda: nn.Conv1d(8, 8, 3, dilation=2),
    "padding in words": lambda: nn.Conv1d(8, 8, 3, padding="same"),
    "fp32": lambda: nn.Conv1d(8, 8, 3).double(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_are_left_alone(name):
    model = nn.Sequential(OTHERS[name](), nn.ReLU())
    x = torch.randn(2, 8, 40, dtype=next(model.parameters()).dtype)
    wanted = model(x)
    amp_graph.convert(model)
    assert (model(x) - wanted).norm() <= 0.02 * wanted.norm()
    assert not calls(model)


def test_lengths_that_change():
    torch.manual_seed(0)
    model = amp_graph.convert(Net())
    for length in (400, 500, 600, 715):
        x = torch.randn(2, 1, length)
        wanted = Net.forward(copy.deepcopy(model), x)
        out = model(x)
        out.sum().backward()
        assert out.shape == wanted.shape
    assert len(conversion_of(model).graphs) <= 2
    assert calls(model)


def test_a_step_computes_what_the_loop_does():
    torch.manual_seed(0)
    base, x = Net(), torch.randn(3, 1, 400)
    wanted = torch.randn_like(base(x))
    loop, whole = amp_graph.convert(copy.deepcopy(base)), copy.deepcopy(base)
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
    step = amp_graph.TrainStep(whole, F.mse_loss, torch.optim.SGD(whole.parameters(), lr=0.1), "bf16")
    for turn_ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(loop(x + turn_), wanted)
        loss.backward()
        optimizer.step()
        assert torch.isclose(step(x + turn_, wanted), loss, rtol=1e-3)


def test_sizes_that_pay(monkeypatch):
    monkeypatch.setattr(conv_thresholds, "cpu_has_amx", lambda: True)
    pays = conv_thresholds.windows_are_profitable
    assert pays("cpu", BF16, 800, 512 * 512 * 3, True)
    assert not pays("cpu", BF16, 100, 64 * 64, True)
    assert not pays("cuda", BF16, 800, 512 * 512 * 3, True)
    assert not pays("cpu", torch.float16, 800, 512 * 512 * 3, False)
    monkeypatch.setattr(conv_thresholds, "cpu_has_amx", lambda: False)
    assert not pays("cpu", BF16, 800, 512 * 512 * 3, True), "torch's own convolution is faster with dot products alone"

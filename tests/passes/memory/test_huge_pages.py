"""Large new memory: the same numbers in the same layout, and only whole pages of its own are asked for."""

import mmap

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import amp_graph
from amp_graph.passes.memory import huge_pages, upcast_into_huge_pages
from amp_graph.passes.memory.huge_pages import empty_like, widen
from amp_graph.passes.native import cast_kernel
from amp_graph.passes.profitability import thresholds

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZE = mmap.PAGESIZE


@pytest.fixture
def asked(monkeypatch):
    """What is asked for, as (start, length), of whatever fills four pages."""
    found = []
    monkeypatch.setattr(thresholds, "LEAST_MAPPED", 4 * SIZE)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: lambda start, length, advice: found.append((start, length)))
    return found


def drawn(*shape, dtype=BF16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    x.view(-1)[3], x.view(-1)[5], x.view(-1)[7] = torch.nan, torch.inf, -0.0
    return x


LAID = {
    "rows": lambda x: x,
    "across": lambda x: x.transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "cut": lambda x: x[:, :, 1:-1],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("laid", LAID)
def test_widening_is_torchs_bit_for_bit_and_stride_for_stride(laid, dtype, asked):
    x = LAID[laid](drawn(4, 8, 16, 64, dtype=dtype))
    found, expected = widen(x), x.float()
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), "NaNs included"
    assert (found.dtype, found.stride()) == (FP32, expected.stride())
    assert len(asked) == 1


def test_whole_pages_of_its_own_are_asked_for(asked):
    for extra in range(0, SIZE, 1000):
        made = empty_like(torch.empty(5 * SIZE + extra, dtype=torch.int8))
        start, length = asked.pop()
        end = made.data_ptr() + made.numel()
        assert start % SIZE == length % SIZE == 0
        assert made.data_ptr() <= start < made.data_ptr() + SIZE
        assert end - SIZE < start + length <= end


def test_small_memory_is_left_alone(asked):
    empty_like(torch.empty(4 * SIZE - 1, dtype=torch.int8))
    widen(drawn(SIZE - 1))
    assert not asked


def test_where_nothing_can_be_asked(monkeypatch):
    monkeypatch.setattr(thresholds, "LEAST_MAPPED", 1)
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert torch.equal(widen(drawn(64)[8:]), drawn(64)[8:].float())


def test_the_system_takes_the_advice_or_refuses_it(monkeypatch):
    advise = huge_pages._madvise()
    if advise is None:
        pytest.skip("no madvise")
    x = torch.ones(1 << 24, dtype=BF16)
    assert widen(x).sum(dtype=torch.float64) == 1 << 24, "64 MiB, by the real call"
    assert advise(1, SIZE, mmap.MADV_HUGEPAGE) == -1, "an error is an answer, no exception"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_gradients_and_transforms_are_torchs(asked):
    x = torch.randn(64, 256).bfloat16().requires_grad_()
    widen(x).square().sum().backward()
    expected = torch.autograd.grad(x.float().square().sum(), x)[0]
    assert torch.equal(x.grad, expected)
    given = x.detach()
    assert torch.equal(torch.func.vmap(widen)(given), given.float())
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(widen(forward_ad.make_dual(given, given)))
    assert torch.equal(made.tangent, given.float())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 512)

    def forward(self, x):
        return self.last(self.first(x).relu())


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def converted(policy="bf16", grad=False):
    torch.manual_seed(0)
    model = amp_graph.convert(Head(), policy)
    with torch.set_grad_enabled(grad):
        return model(X).detach(), model


def has_it(model):
    return "widen(" in amp_graph.capture.conversion.conversion_of(model).graphs[0].rewritten.gm.code


def test_outputs_of_inference_are_widened_so(asked):
    """By the same products of plain weights: those by panels return fp32 themselves where nothing else widens."""
    found, model = converted("bf16,skip=reuse_output_buffers|prepack_weights")
    expected, plain = converted("bf16,skip=upcast_into_huge_pages|prepack_weights")
    assert has_it(model)
    assert not has_it(plain)
    assert torch.equal(found, expected)
    assert asked


def test_outputs_of_packed_weights_are_those_of_fp32_rounded_once(asked):
    found, model = converted("bf16,skip=reuse_output_buffers")
    wide, plain = converted("bf16,skip=upcast_into_huge_pages")
    assert has_it(model)
    assert not has_it(plain)
    assert torch.equal(found, wide.to(BF16).float())


@pytest.mark.parametrize("least", [1, 1 << 40], ids=["by C", "by torch"])
def test_outputs_of_training_are_widened_so_with_their_gradients(least, asked, monkeypatch):
    monkeypatch.setattr(cast_kernel, "LARGE", least)
    grads = []
    for policy in ("bf16", "bf16,skip=upcast_into_huge_pages"):
        found, model = converted(policy, grad=True)
        assert has_it(model) == ("skip" not in policy)
        model(X).square().sum().backward()
        grads.append([found, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *grads))


def test_small_outputs_are_torchs(asked, monkeypatch):
    monkeypatch.setattr(thresholds, "LEAST_MAPPED", 1 << 25)
    assert not has_it(converted("bf16,skip=reuse_output_buffers")[1])


def test_widening_has_second_derivatives_and_several_gradients():
    x = torch.randn(8, 16).to(BF16).requires_grad_()
    (first,) = torch.autograd.grad(widen(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    assert torch.equal(first, (3 * x.detach().float().square()).to(BF16))
    torch.testing.assert_close(second, 6 * x.detach(), rtol=2**-7, atol=0)
    many = torch.randn(3, 8, 16)
    (together,) = torch.autograd.grad(widen(x), x, many, is_grads_batched=True)
    assert torch.equal(together, many.to(BF16))


def test_control_another_number_is_seen(asked, monkeypatch):
    monkeypatch.setattr(upcast_into_huge_pages, "widen", lambda x: x.float() * 1.01)
    assert not torch.equal(converted()[0], converted("bf16,skip=upcast_into_huge_pages")[0])

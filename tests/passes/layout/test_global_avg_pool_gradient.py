"""Averages over whole images: torch's bits, and gradients that take no memory and no layout."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_graph.passes.layout.global_avg_pool_gradient import GlobalAvgPoolGradient, pooled
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    BF16,
    FP32,
    assert_left_alone,
    assert_near,
    capture_function,
    multiply_bf16,
    run_step,
    with_and_without,
)

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _a_machine_where_it_is_profitable(monkeypatch):
    multiply_bf16(monkeypatch, multiplies=True)


def step(function, dtype, seed=1):
    x = drawn(3, 8, 5, 7, seed=seed).to(dtype).contiguous(memory_format=LAST).requires_grad_()
    out = function(x)
    return out.detach(), *torch.autograd.grad(out, x, drawn(*out.shape, seed=5).to(out.dtype))


AVERAGES = {
    "pool": (lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: pooled(x, True, x.dtype)),
    "mean": (lambda x: x.mean((2, 3)), lambda x: pooled(x, False, x.dtype)),
    "kept": (lambda x: x.mean((-1, -2), True), lambda x: pooled(x, True, x.dtype)),
    "widened": (lambda x: x.mean((2, 3), dtype=torch.float32), lambda x: pooled(x, False, torch.float32)),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("name", AVERAGES)
def test_the_same_bits_and_a_gradient_without_memory_of_its_own(name, dtype):
    torchs, ours = AVERAGES[name]
    for mine, other in zip(step(ours, dtype), step(torchs, dtype), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert step(ours, dtype)[1].untyped_storage().nbytes() == 3 * 8 * dtype.itemsize


def squeezed(pool):
    """A block that weighs its channels by their averages (Hu et al., "Squeeze-and-Excitation Networks", 2018)."""

    def function(s, x):
        h = F.silu(F.conv2d(x, s.w, padding=1))
        return F.conv2d(h * torch.sigmoid(F.conv2d(pool(h).view(h.shape[0], -1, 1, 1), s.v)), s.v)

    return function


X = drawn(2, 4, 6, 6, seed=1)
STATE = {"w": drawn(8, 4, 3, 3, seed=2) / 6, "v": drawn(8, 8, 1, 1, seed=3) / 3}
POOLS = {
    "adaptive": lambda h: F.adaptive_avg_pool2d(h, (1, 1)),
    "module": nn.AdaptiveAvgPool2d(1),
    "method": lambda h: h.mean((2, 3), keepdim=True),
    "negative": lambda h: torch.mean(h, dim=[-2, -1]),
}


def passed(function, x=X):
    return with_and_without(GlobalAvgPoolGradient(), capture_function(function, x, **STATE))


@pytest.mark.parametrize("name", POOLS)
def test_no_bit_of_a_block_changes(name):
    plain, ours, given, result = passed(squeezed(POOLS[name]))
    assert len(result.changes) == 1
    ours_step, plain_step = run_step(ours, given), run_step(plain, given)
    assert torch.equal(ours_step.outputs[0], plain_step.outputs[0])
    assert_near(ours_step, plain_step, 0.005)  # products sum up another layout


def test_gradients_stay_channels_last():
    x = drawn(2, 8, 6, 6).bfloat16().contiguous(memory_format=LAST).requires_grad_()
    h, seen = x * 2, []
    h.register_hook(lambda g: seen.append(g.is_contiguous(memory_format=LAST)))
    y = h * torch.sigmoid(pooled(h, True, h.dtype))
    y.backward(torch.randn_like(y))
    assert seen == [True]


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: F.adaptive_avg_pool2d(h, 2)[:, :, :1, :1],
        lambda h: h.mean((1, 2))[:, None, None, :1].expand(-1, 8, 1, 1),
        lambda h: h.contiguous().mean((2, 3)),
        lambda h: h.detach().mean((2, 3)),
    ],
    ids=["more places", "channels", "contiguous", "no gradient"],
)
def test_left_alone(pool):
    assert_left_alone(passed(squeezed(pool)))


def test_control_a_share_of_another_size_is_seen():
    wrong = lambda x: pooled(x, False, x.dtype) * 1.01  # noqa: E731
    torchs, _ = AVERAGES["mean"]
    assert not torch.equal(step(wrong, BF16)[1], step(torchs, BF16)[1])

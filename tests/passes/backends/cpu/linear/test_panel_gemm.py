"""A linear over few rows in compiled C: any size and layout, sums in fp32 rounded once, NaN through the relu."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from amp_graph.passes.backends.cpu.inference import prepack_weights
from amp_graph.passes.backends.cpu.linear import panel_gemm as kernel
from amp_graph.passes.native.kernel_table import typed
from tests.passes.builds import BUILDS, assert_rounded_once, built, memory_that_is_not_zero  # noqa: F401
from tests.passes.drawn import drawn_low as drawn
from tests.passes.graphs import BF16
from tests.threads import in_threads

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(params=BUILDS, autouse=True)
def _built_for(request, monkeypatch):
    found = typed(built(kernel.SOURCE, request.param), kernel.FUNCTIONS)
    monkeypatch.setattr(kernel, "library", lambda: found)


# rows, inputs, outputs: around what is multiplied at a time (4 or 32 rows, 2 or 32 inputs, 64 or 32 outputs)
SIZES = [
    (1, 1, 1), (1, 64, 64), (2, 7, 5), (3, 33, 31), (4, 32, 64), (5, 34, 65), (16, 31, 33), (17, 96, 130), (32, 64, 32),
    (33, 65, 96), (64, 128, 63), (100, 13, 200),
]  # fmt: skip


def operands(rows, inputs, outputs):
    return drawn(rows, inputs), drawn(outputs, inputs, seed=1), drawn(outputs, seed=2)


def ours(x, weight, bias=None, relu=False):
    return kernel.linear_by_panels(x, kernel.panels_of(weight), bias, relu, len(weight))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_is_rounded_once(size, biased, relu):
    x, weight, bias = operands(*size)
    bias = bias if biased else None
    assert_rounded_once(ours(x, weight, bias, relu), x, weight.t(), bias, relu)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, b: ours(x, w.roll(1, 0), b),
        lambda x, w, b: ours(x, w, b.roll(1, 0)),
        lambda x, w, b: ours(x, w, None),
        lambda x, w, b: (ours(x, w).float() + b.float()).to(BF16),  # rounded twice
    ],
    ids=["another output", "another bias", "no bias", "rounded twice"],
)
def test_control_what_is_wrong_is_found_out(wrong):
    x, weight, bias = operands(64, 32, 130)
    with pytest.raises(AssertionError):
        assert_rounded_once(wrong(x, weight, bias * 8), x, weight.t(), bias * 8)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_panels_hold_the_weight(size):
    _, weight, _ = operands(*size)
    assert torch.equal(kernel.dense_of(kernel.panels_of(weight), *weight.shape), weight)
    turned = drawn(size[1], size[2], seed=1)
    assert torch.equal(kernel.dense_of(kernel.panels_of(turned.t()), size[2], size[1]), turned.t())


def test_any_layout_gives_the_same_bits():
    x, weight, bias = operands(12, 40, 70)
    expected = ours(x, weight, bias)
    wide = torch.full((12, 57), float("nan"), dtype=BF16)
    wide[:, 9:49] = x
    for same in (wide[:, 9:49], x.t().contiguous().t(), x.repeat_interleave(2, 0)[::2]):
        assert torch.equal(ours(same, weight, bias), expected)
    assert torch.equal(ours(x.view(2, 3, 2, 40), weight, bias), expected.view(2, 3, 2, 70))
    assert torch.equal(ours(x[0], weight, bias), expected[0])
    assert ours(x[:0], weight, bias).shape == (0, 70)


def test_rows_that_are_no_numbers_stay_alone_and_go_through_the_relu():
    x, weight, bias = operands(7, 33, 66)
    expected = ours(x, weight, bias, relu=True)
    x[3, 5], x[4, 32] = float("nan"), float("inf")
    found = ours(x, weight, bias, relu=True)
    assert found[3].isnan().all()
    assert torch.equal(found[4].isinf(), weight[:, 32] > 0)
    others = [0, 1, 2, 5, 6]
    assert torch.equal(found[others], expected[others])


def test_threads_have_memory_of_their_own():
    sizes = [(9, 35, 40), (40, 70, 33), (3, 129, 64), (33, 31, 90)]
    given = [operands(*size) for size in sizes]
    expected, found = [ours(*one) for one in given], {}

    def call(at):
        for _ in range(50):
            one = ours(*given[at])
            found[at] = found.get(at, True) and torch.equal(one, expected[at])

    in_threads(*(partial(call, at) for at in range(len(sizes))))
    assert found == dict.fromkeys(range(len(sizes)), True)


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="asks Linux how much memory is held")
def test_memory_of_threads_ends_with_them():
    def held():  # bytes
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def multiply():
        kernel.product(x, weight.t())

    x, weight = torch.randn(64, 2047).to(BF16), torch.randn(64, 2047).to(BF16)  # which is laid out: 0.3 MB
    multiply()
    before = held()
    for _ in range(200):
        in_threads(multiply)
    assert held() - before < 20e6


def test_modes_and_profiles_see_what_is_run():
    """A dispatch mode has no memory that compiled C could read: torch multiplies."""
    x, weight, bias = operands(4, 32, 48)
    run = partial(prepack_weights.linear_of_panels, x, kernel.panels_of(weight), bias, "relu", outputs=48)
    plain = run()
    with FlopCounterMode(display=False) as counted:
        torch.testing.assert_close(run(), plain, rtol=2**-7, atol=2**-7)
    assert counted.get_total_flops() == 2 * 4 * 32 * 48
    with torch.profiler.profile() as profile:
        assert torch.equal(run(), plain)
    names = {event.key for event in profile.key_averages()}
    assert "amp_graph::linear_by_panels" in names
    assert not {"aten::addmm", "aten::linear"} & names


@pytest.mark.sampled(3)
@pytest.mark.parametrize("threads", [2, 3, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_threads_have_columns_of_their_own_and_change_no_bit(size, threads, monkeypatch):
    x, weight, bias = operands(*size)
    alone = ours(x, weight, bias, True), kernel.product(x, weight.t(), bias), kernel.product(weight, x.t())
    monkeypatch.setattr(kernel, "threads_at_once", lambda elements: threads)
    together = ours(x, weight, bias, True), kernel.product(x, weight.t(), bias), kernel.product(weight, x.t())
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))

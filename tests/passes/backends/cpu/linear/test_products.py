"""Products in compiled C, by panels and by matrix units: any size and layout, sums in fp32 that are rounded once."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from amp_graph.passes.backends.cpu.inference import prepack_weights
from amp_graph.passes.backends.cpu.linear import amx_gemm, panel_gemm
from amp_graph.passes.backends.cpu.linear.amx_gemm import amx_product, amx_product_and_sums, gradients_of_linear
from amp_graph.passes.native.kernel_table import typed
from tests.passes.builds import BUILDS, assert_rounded_once, built, memory_that_is_not_zero  # noqa: F401
from tests.passes.drawn import drawn_low as drawn
from tests.passes.graphs import BF16
from tests.threads import in_threads

pytestmark = pytest.mark.skipif(panel_gemm.library() is None, reason="needs AVX512_BF16 and a C compiler")


def by_panels(a, b, bias=None, relu=False):
    return panel_gemm.linear_by_panels(a, panel_gemm.panels_of(b.t()), bias, relu, b.shape[1])


def as_it_lies(a, b, bias=None):
    return panel_gemm.product(amx_gemm.side_by_side(a), amx_gemm.side_by_side(b), bias)


@pytest.fixture(params=BUILDS)
def panels(request, monkeypatch):
    """The products of few rows, by a build."""
    found = typed(built(panel_gemm.SOURCE, request.param), panel_gemm.FUNCTIONS)
    monkeypatch.setattr(panel_gemm, "library", lambda: found)


@pytest.fixture(params=["matrix units", "emulated units"])
def units(request, monkeypatch):
    """The products by matrix units, or by an emulation of these."""
    found = typed(built(amx_gemm.SOURCE, request.param), amx_gemm.FUNCTIONS)
    monkeypatch.setattr(amx_gemm, "library", lambda: found)


EVERY = [(f, b) for f in (by_panels, as_it_lies) for b in BUILDS] + [(amx_product, b) for b in BUILDS[:2]]


@pytest.fixture(params=EVERY, ids=lambda one: f"{one[0].__name__} {one[1]}")
def product(request, monkeypatch):
    """A product, by a build."""
    function, name = request.param
    module = amx_gemm if function is amx_product else panel_gemm
    found = typed(built(module.SOURCE, name), module.FUNCTIONS)
    monkeypatch.setattr(module, "library", lambda: found)
    return function


# rows, depth, columns: around what is multiplied at a time (4 or 32 rows, 2 or 32 of the depth, 32 or 64 columns), and
# by matrix units around what waits (128 rows) and is laid out (384 columns, 256 and 2,048 of the depth)
SIZES = [
    (1, 1, 1), (1, 64, 64), (2, 7, 5), (3, 33, 31), (4, 32, 64), (5, 34, 65), (16, 31, 33), (17, 96, 130), (32, 64, 32),
    (33, 65, 96), (64, 128, 63), (100, 13, 200), (33, 97, 65), (31, 255, 1), (1, 256, 100), (100, 257, 33),
    (130, 31, 385), (129, 513, 400), (300, 300, 770), (257, 1000, 31), (47, 5, 500), (5, 6145, 3),
    pytest.param((290, 8200, 390), marks=pytest.mark.slow),  # emulated, 12 s
]  # fmt: skip


def operands(rows, depth, columns):
    return drawn(rows, depth), drawn(depth, columns, seed=1), drawn(columns, seed=2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_and_order_of_memory(size, biased, product):
    a, b, bias = operands(*size)
    given = [bias] * biased
    found = product(a, b, *given)
    assert_rounded_once(found, a, b, *given)
    for one in (a, a.t().contiguous().t()):
        assert all(torch.equal(product(one, other, *given), found) for other in (b, b.t().contiguous().t()))


LAYOUTS = {
    "a part": (drawn(64, 96)[3:50, 5:70], drawn(80, 90)[7:72, 2:60]),
    "a part in columns": (drawn(96, 64)[5:70, 3:50].t(), drawn(90, 80)[2:60, 7:72].t()),
    "gaps": (drawn(80, 100)[::2, ::2], drawn(100, 60)[::2, ::2]),
    "one row for all": (drawn(1, 40).expand(50, 40), drawn(40, 70)),
    "one column for all": (drawn(50, 40), drawn(40, 1).expand(40, 70)),
    "one number": (drawn(1, 1).expand(50, 40), drawn(1, 1).expand(40, 70)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_lies_otherwise(name, product):
    a, b = LAYOUTS[name]
    found = product(a, b)
    assert_rounded_once(found, a, b)
    assert torch.equal(found, product(a.contiguous(), b.contiguous()))


def test_any_bias(product):
    a, b, _ = operands(40, 50, 70)
    for bias in (drawn(1), drawn(140)[::2], drawn(1).expand(70)):
        assert_rounded_once(product(a, b, bias), a, b, bias)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("threads", [2, 3, 7, 64])
@pytest.mark.parametrize("size", [(300, 300, 770), (770, 300, 300), (5, 9000, 40), *SIZES[4:12]], ids=str)
def test_threads_change_no_bit(size, threads, product, monkeypatch):
    given = operands(*size)
    alone = product(*given)
    for module in (amx_gemm, panel_gemm):
        monkeypatch.setattr(module, "threads_at_once", lambda count: threads)
    assert torch.equal(product(*given), alone)


def test_nan_and_infinity_reach_their_row_and_column_alone(product):
    a, b, _ = operands(70, 50, 90)
    a[3, 4], b[7, 8] = torch.nan, torch.inf
    found, theirs = product(a, b), a.float() @ b.float()
    assert torch.equal(found.isnan(), theirs.isnan())
    assert torch.equal(found.isinf(), theirs.isinf())
    assert product(a[:1] * 0 + 3e38, b[:, :1] * 0 + 3e38).isinf().all()


def test_control_what_is_wrong_is_found_out(product):
    a, b, bias = operands(64, 300, 70)
    bias = bias * 8
    parts = product(a[:, :150], b[:150]) + product(a[:, 150:], b[150:], bias)  # rounded twice
    others = (product(a.roll(1, 0), b, bias), product(a, b.roll(1, 1), bias), product(a, b, bias.roll(1, 0)))
    for found in (*others, product(a, b), parts):
        with pytest.raises(AssertionError):
            assert_rounded_once(found, a, b, bias)


def test_oneDNN_finds_its_own_tiles_afterwards(product):
    a, b, _ = operands(128, 256, 128)
    before = a @ b
    for _ in range(3):
        product(a, b)
        assert torch.equal(a @ b, before)


def test_threads_have_memory_of_their_own(product):
    sizes = [(3, 0, 5), (9, 35, 40), (40, 70, 33), (3, 129, 64), (33, 31, 90)]
    given = [operands(*size) for size in sizes]
    expected, found = [product(*one) for one in given], {}

    def call(at):
        found[at] = all(torch.equal(product(*given[at]), expected[at]) for _ in range(50))

    in_threads(*(partial(call, at) for at in range(len(sizes))))
    assert found == dict.fromkeys(range(len(sizes)), True)


@pytest.mark.usefixtures("panels")
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="asks Linux how much memory is held")
def test_memory_of_threads_ends_with_them():
    def held():  # bytes
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    multiply = partial(panel_gemm.product, drawn(64, 2047), drawn(64, 2047).t())  # which is laid out: 0.3 MB
    multiply()
    before = held()
    for _ in range(200):
        in_threads(multiply)
    assert held() - before < 20e6


# -- by panels --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("panels")
def test_a_relu_lets_nan_through_and_inputs_have_any_number_of_dimensions():
    x, b, bias = operands(12, 33, 66)
    expected = by_panels(x, b, bias, relu=True)
    assert_rounded_once(expected, x, b, bias, relu=True)
    assert torch.equal(by_panels(x.view(2, 3, 2, 33), b, bias, relu=True), expected.view(2, 3, 2, 66))
    assert torch.equal(by_panels(x[0], b, bias, relu=True), expected[0])
    x[3, 5], x[4, 32] = float("nan"), float("inf")
    found = by_panels(x, b, bias, relu=True)
    assert found[3].isnan().all()
    assert torch.equal(found[4].isinf(), b[32] > 0)
    assert torch.equal(found[5:], expected[5:])


def test_modes_and_profiles_see_what_is_run():
    """A dispatch mode has no memory that compiled C could read: torch multiplies."""
    x, b, bias = operands(4, 32, 48)
    run = partial(prepack_weights.linear_of_panels, x, panel_gemm.panels_of(b.t()), bias, "relu", outputs=48)
    plain = run()
    with FlopCounterMode(display=False) as counted:
        torch.testing.assert_close(run(), plain, rtol=2**-7, atol=2**-7)
    assert counted.get_total_flops() == 2 * 4 * 32 * 48
    with torch.profiler.profile() as profile:
        assert torch.equal(run(), plain)
    names = {event.key for event in profile.key_averages()}
    assert "amp_graph::linear_by_panels" in names
    assert not {"aten::addmm", "aten::linear"} & names


# -- by matrix units --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", SIZES[::2], ids=str)
def test_sums_of_what_a_product_reads_anyway(size, threads, monkeypatch):
    monkeypatch.setattr(amx_gemm, "threads_at_once", lambda count: threads)
    rows, depth, columns = size
    a, b = drawn(depth, rows), drawn(depth, columns, seed=1)
    product, sums = amx_product_and_sums(a, b)
    assert torch.equal(product, amx_product(a.t(), b))
    exact, sizes = a.double().sum(0), a.double().abs().sum(0)
    assert sums.dtype == BF16
    assert ((sums.double() - exact).abs() <= exact.abs() * 2**-8 + sizes * depth * 2**-24).all()
    for other in (a.t().contiguous().t(), torch.cat([a, a], 1)[:, :rows]):
        again, more = amx_product_and_sums(other, b)
        assert torch.equal(again, product)
        assert ((more - sums).abs().double() <= sums.abs() * 2**-7 + sizes * 1e-5).all()
    with pytest.raises(AssertionError):  # control
        torch.testing.assert_close(sums, a[1:].sum(0), rtol=2**-7, atol=1e-6)


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(amx_gemm, "library", lambda: None)
    a, b, _ = operands(64, 96, 70)
    assert torch.equal(amx_product(a, b), a @ b)
    assert all(map(torch.equal, gradients_of_linear(a.t(), b, biased=True), (a @ b, a.sum(1))))


def test_no_memory_is_said(monkeypatch):
    monkeypatch.setattr(amx_gemm, "library", lambda: SimpleNamespace(product=lambda _: 1))
    with pytest.raises(MemoryError, match="a product of 64 x 96 by 96 x 70"):
        amx_product(drawn(64, 96), drawn(96, 70))

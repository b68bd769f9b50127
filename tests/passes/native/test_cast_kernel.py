"""Sums and zeros by compiled C: torch's, bit for bit and stride for stride; and who calls them."""

import pytest
import torch

from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.native import cast_kernel, jit_compiler
from amp_graph.passes.native.cast_kernel import clear, total_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {BF16: torch.int16, FP16: torch.int16, FP32: torch.int32}

pytestmark = pytest.mark.skipif(cast_kernel.library(BF16) is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(cast_kernel, "LARGE", 1)


@pytest.fixture
def counted(monkeypatch):
    """How many tensors C has read and written."""
    found = []
    run = cast_kernel._run
    monkeypatch.setattr(
        cast_kernel, "_run", lambda f, made, *more, **kind: (found.append(made), run(f, made, *more, **kind))
    )
    return found


def anything(*shape, dtype=FP32, seed=0):
    """Numbers of all sizes: any bits, infinities, NaN, denormals and zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-40, -3e-39, 65519.9, 65520, 6e-8, 3.4e38])
    found = bits.view(FP32).flatten()
    found[: min(len(found), len(special))] = special[: len(found)]
    return found.view(shape).to(dtype)


def same(one, other):
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(one.isnan(), other.isnan())
    assert torch.equal(*(t.masked_fill(t.isnan(), 0).view(INTEGERS[t.dtype]) for t in (one, other)))


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512", "DEFAULT"])
@pytest.mark.parametrize("low", [BF16, FP16])
def test_by_any_instructions(instructions, low, monkeypatch):
    capability = torch.backends.cpu.get_cpu_capability()
    if instructions != "DEFAULT" and instructions not in (capability, "AVX2" if capability == "AVX512" else ""):
        pytest.skip(f"a CPU without {instructions}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    found = jit_compiler._loaded(cast_kernel.SOURCE, jit_compiler.MACROS[low])
    plain = cast_kernel.library(low)
    found.add_up.argtypes = plain.add_up.argtypes
    monkeypatch.setattr(cast_kernel, "library", lambda low: found)
    wide = anything(77, 131)
    same(total_of([wide, wide.to(low)]), wide + wide.to(low))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr(cast_kernel, "threads_for", lambda count: threads)
    wide = anything(50_001)
    same(total_of([wide, wide.to(BF16)]), wide + wide.to(BF16))
    same(clear(wide.clone()), torch.zeros(50_001))


def one_by_one(terms):
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("dtypes", [(BF16,) * 2, (FP32, BF16), (BF16, FP32, BF16), (FP16, FP32), (BF16,) * 16], ids=str)
def test_sums_are_those_of_fp32_one_by_one(dtypes, counted):
    terms = [torch.randn(37, 65, generator=torch.Generator().manual_seed(i)).to(d) for i, d in enumerate(dtypes)]
    terms[0][3, 3] = torch.nan
    same(total_of(terms), one_by_one(terms))
    assert len(counted) == 1


def test_control_a_sum_in_another_order_or_precision_is_found_out():
    terms = [torch.randn(37, 65, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    terms[1] = terms[1].to(BF16)
    with pytest.raises(AssertionError):
        same(total_of(terms), one_by_one(terms[::-1]))
    with pytest.raises(AssertionError):
        same(total_of(terms), one_by_one([t.to(BF16) for t in terms]))


def test_what_c_cannot_add_is_left_to_who_asks():
    x = torch.randn(8, 8).to(BF16)
    assert total_of([x, x.to(FP16)]) is None, "two low precisions"
    assert total_of([x, x.t()]) is None, "two layouts"
    assert total_of([x, x[:1]]) is None, "two shapes"
    assert total_of([x[:, ::2], x[:, ::2]]) is None, "gaps"
    assert total_of([x.double(), x]) is None
    assert total_of([x] * 17) is None
    assert total_of([x.to("meta")] * 2) is None


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(cast_kernel, "library", lambda low: None)
    wide = anything(40, 40)
    same(clear(wide.clone()), torch.zeros(40, 40))
    assert total_of([wide, wide]) is None


# -- where they are called --------------------------------------------------------------------------------------


def test_shared_casts_add_in_one_pass(counted):
    grads = [torch.randn(16, 32).to(BF16) for _ in range(3)]
    x = torch.randn(16, 32, requires_grad=True)
    parts = shared_cast(x, BF16, 3, False)
    torch.autograd.backward(parts, grads)
    assert torch.equal(x.grad, grads[0].float() + grads[1] + grads[2])
    assert len(counted) == 1

"""Casts, sums and zeros by compiled C: torch's, bit for bit and stride for stride; and who calls them."""

import copy

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.native import cast_kernel, jit_compiler
from amp_graph.passes.native.cast_kernel import clear, copy_into, total_of, widened
from amp_graph.passes.weights import cast_weights
from amp_graph.passes.weights.cast_weights import cast_weight

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


LAYOUTS = {
    "rows": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3),
}


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 5, 7, 11), (2, 8, 16, 64), (1, 4096, 3, 1)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_casts_are_torchs(low, shape, layout, counted):
    wide = LAYOUTS[layout](anything(*shape))
    expected = wide.to(low)
    same(copy_into(torch.empty_like(wide, dtype=low), wide), expected)
    same(widened(expected, expected), expected.float())
    assert len(counted) == 2


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512", "DEFAULT"])
@pytest.mark.parametrize("low", [BF16, FP16])
def test_by_any_instructions(instructions, low, monkeypatch):
    capability = torch.backends.cpu.get_cpu_capability()
    if instructions != "DEFAULT" and instructions not in (capability, "AVX2" if capability == "AVX512" else ""):
        pytest.skip(f"a CPU without {instructions}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    found = jit_compiler._loaded(cast_kernel.SOURCE, jit_compiler.MACROS[low])
    plain = cast_kernel.library(low)
    found.add_up.argtypes, found.round_off.argtypes = plain.add_up.argtypes, plain.round_off.argtypes
    monkeypatch.setattr(cast_kernel, "library", lambda low: found)
    wide = anything(77, 131)
    same(copy_into(torch.empty_like(wide, dtype=low), wide), wide.to(low))
    same(widened(wide.to(low), wide), wide.to(low).float())
    same(total_of([wide, wide.to(low)]), wide + wide.to(low))


@pytest.mark.parametrize("ahead", [1, 3, 15, 17])
@pytest.mark.parametrize("count", [1, 15, 33, 5000])
def test_places_that_do_not_begin_with_a_line_and_what_lies_beside(ahead, count):
    for made, source in (
        (torch.full((6000,), 7.0), anything(count).to(BF16)),
        (torch.full((6000,), 7.0).to(BF16), anything(count)),
    ):
        same(copy_into(made[ahead : ahead + count], source), source.to(made.dtype))
        assert made[:ahead].eq(7).all()
        assert made[ahead + count :].eq(7).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads, monkeypatch):
    monkeypatch.setattr(cast_kernel, "threads_for", lambda count: threads)
    wide = anything(50_001)
    same(copy_into(torch.empty(50_001, dtype=BF16), wide), wide.to(BF16))
    same(widened(wide.to(BF16), wide), wide.to(BF16).float())
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


LAID = [(3, 5, 2, 2), (32, 16, 3, 3), (33, 17, 3, 3), (7, 40, 1, 5), (2, 130, 7, 7), (5, 3, 8, 8), (4, 6, 9, 8)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", LAID, ids=str)
def test_layouts_of_a_convolutions_weight(shape, low, threads, monkeypatch):
    """Into channels_last and out of it, number for number; a kernel of more places than C's block is torch's."""
    monkeypatch.setattr(cast_kernel, "LARGE_OF_PLACES", 1)
    monkeypatch.setattr(cast_kernel, "threads_for", lambda count: threads)
    laid = []
    lays_out = cast_kernel._lays_out
    monkeypatch.setattr(cast_kernel, "_lays_out", lambda *given: laid.append(lays_out(*given)) or laid[-1])
    first, last = anything(*shape), anything(*shape, dtype=low, seed=1).contiguous(memory_format=torch.channels_last)
    for source, made in ((first, torch.empty_like(last)), (last, torch.empty_like(first))):
        wanted = made.clone().copy_(source)
        same(copy_into(made, source), wanted)
    assert laid == [shape[2] * shape[3] <= 64] * 2
    same(copy_into(torch.empty_like(last), last.float()), last)
    with pytest.raises(AssertionError):  # control
        same(copy_into(torch.empty_like(first), last), copy_into(torch.empty_like(first), last.roll(1, 3)))


@pytest.mark.parametrize("policy", ["bf16"])
def test_convolutions_hand_back_gradients_that_lie_as_their_weights(policy):
    """A contiguous weight, and one that was channels_last before: each gradient lies as its weight does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(16, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 160, 3, padding=1, bias=False))
    plain[0].weight.data = plain[0].weight.data.contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 16, 12, 12)
    grads = []
    for kind in (policy, "bf16,skip=channels_last"):
        model = amp_graph.convert(copy.deepcopy(plain), kind)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
        grads.append([p.grad for p in model.parameters()])
        copied = "cast_weight" in amp_graph.report(model).graphs[0].text
        assert copied == ("false" not in kind)
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_what_c_cannot_cast_torch_does(counted):
    wide = torch.randn(4, 8)
    for made, source in (
        (torch.empty(4, 8, dtype=BF16), wide[:, :1]),
        (torch.empty(8, 4, dtype=BF16).t(), wide),
        (torch.empty(4, 8, dtype=BF16), torch.randn(1, 8).expand(4, 8)),
        (torch.empty(4, 8, dtype=FP16), wide.to(BF16)),
        (torch.empty(4, 8), wide.double()),
        (torch.empty(4, 8, dtype=torch.float64), wide),
    ):
        assert torch.equal(copy_into(made, source), source.expand(4, 8).to(made.dtype))
    assert torch.equal(clear(torch.ones(4, dtype=torch.float64)), torch.zeros(4, dtype=torch.float64))
    assert copy_into(torch.empty(4, 8, device="meta", dtype=BF16), wide.to("meta")).is_meta
    assert not counted


def test_without_a_compiler_it_is_torchs(monkeypatch):
    monkeypatch.setattr(cast_kernel, "library", lambda low: None)
    wide = anything(40, 40)
    same(copy_into(torch.empty(40, 40, dtype=BF16), wide), wide.to(BF16))
    same(clear(wide.clone()), torch.zeros(40, 40))
    assert total_of([wide, wide]) is None


# -- where they are called --------------------------------------------------------------------------------------


def lent():
    weight = nn.Parameter(torch.randn(64, 48))
    low = weight.detach().to(BF16)
    return weight, cast_weight(weight, low.dtype), low


def test_a_lent_copy_hands_its_gradient_back_in_fp32(counted):
    weight, given, _ = lent()
    x = torch.randn(8, 48).to(BF16)
    for turn in range(2):  # any number of times
        (x @ given.t()).float().square().sum().backward()
        plain = nn.Parameter(weight.detach().clone())
        (x @ plain.to(BF16).t()).float().square().sum().backward()
        assert torch.equal(weight.grad, plain.grad * (turn + 1))
    assert len(counted) == 2


def test_a_lent_copy_has_second_derivatives_and_several_gradients():
    weight, given, _ = lent()
    x = torch.randn(8, 48).to(BF16)
    (first,) = torch.autograd.grad((x @ given.t()).float().pow(3).sum(), weight, create_graph=True)
    assert first.dtype == FP32
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    plain = weight.detach().clone().requires_grad_()
    (first,) = torch.autograd.grad((x @ plain.to(BF16).t()).float().pow(3).sum(), plain, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(first.square().sum(), plain)[0])
    many = torch.randn(3, 64, 48).to(BF16)
    (together,) = torch.autograd.grad(given, weight, many, is_grads_batched=True)
    assert torch.equal(together, many.float())


def test_shared_casts_add_in_one_pass(counted):
    grads = [torch.randn(16, 32).to(BF16) for _ in range(3)]
    x = torch.randn(16, 32, requires_grad=True)
    parts = shared_cast(x, BF16, 3, False)
    torch.autograd.backward(parts, grads)
    assert torch.equal(x.grad, grads[0].float() + grads[1] + grads[2])
    assert len(counted) == 1


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(50, 64), nn.Linear(64, 50)
        self.conv = nn.Conv2d(4, 64, 3, padding=1)

    def forward(self, ids):
        images = self.conv(self.table(ids).view(len(ids), 4, 4, -1)).flatten(2).mean(2)
        return self.head(images.relu())


@pytest.mark.parametrize("policy", ["bf16"])
def test_a_converted_model_trains_bit_for_bit_as_without_c(policy, monkeypatch):
    monkeypatch.setattr(cast_weights, "LARGE", 1)
    ids = torch.randint(50, (8, 4), generator=torch.Generator().manual_seed(1))
    found = []
    for library in (cast_kernel.library, lambda low: None):
        monkeypatch.setattr(cast_kernel, "library", library)
        model = amp_graph.convert(Words(), policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(4):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_another_default_device_changes_nothing():
    weight = nn.Parameter(torch.randn(64, 48))
    with torch.device("meta"):
        given = cast_weight(weight, BF16)
        given.sum().backward()
    assert torch.equal(weight.grad, torch.ones(64, 48))

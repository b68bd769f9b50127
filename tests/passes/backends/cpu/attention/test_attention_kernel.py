"""Attention in compiled C: every size, layout and mask against fp64, and what is no number stays where it belongs."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention import dropout_bits
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.native.jit_compiler import PARTS
from amp_graph.passes.native.kernel_table import typed
from tests.passes.builds import BUILDS, built, memory_that_is_not_zero  # noqa: F401
from tests.passes.drawn import differentiated, drawn
from tests.passes.graphs import BF16
from tests.relative_error import errors

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs AVX512_BF16 and a C compiler")


@pytest.fixture(params=BUILDS, autouse=True)
def _built_for(request, monkeypatch):
    found = [typed(built(kernel.SOURCE, request.param, part), kernel.FUNCTIONS) for part in PARTS.values()]
    monkeypatch.setattr(kernel, "library", lambda: found[0])
    monkeypatch.setattr(kernel, "backward_library", lambda: found[1])


def test_gradients_that_could_not_be_compiled_are_those_of_products(monkeypatch):
    given = [torch.randn(1, 2, 8, 16, dtype=BF16, requires_grad=True) for _ in range(3)]
    attention_low(*given).float().square().sum().backward()
    compiled = [t.grad for t in given]
    for t in given:
        t.grad = None
    monkeypatch.setattr(kernel, "backward_library", lambda: None)
    attention_low(*given).float().square().sum().backward()
    for one, t in zip(compiled, given, strict=True):
        assert not torch.equal(one, t.grad)  # by other sums
        torch.testing.assert_close(one, t.grad, rtol=2**-6, atol=2**-6)


# batch, heads, heads of keys, queries, keys, width, causal
SIZES = {
    "one tile": (1, 2, 2, 6, 64, 16, False),
    "a bit of each": (2, 3, 3, 7, 5, 34, False),
    "one query": (2, 4, 2, 1, 300, 64, False),
    "a panel and a half of the width": (1, 2, 1, 40, 70, 96, False),
    "a narrow last panel": (1, 2, 2, 33, 130, 66, True),
    "several chunks of queries": (1, 4, 2, 600, 90, 32, False),
    "several chunks, causal": (1, 2, 2, 530, 530, 64, True),
    "more keys than queries, causal": (1, 2, 2, 20, 200, 64, True),
    "more queries than keys, causal": (1, 4, 1, 300, 70, 128, True),
    "a tile of keys across panels, causal": (2, 2, 1, 64, 66, 30, True),
    "a part of a tile behind the last query, causal": (1, 4, 1, 63, 127, 32, True),
}


def operands(name, dtype=BF16):
    batch, heads, shared, queries, keys, width, causal = SIZES[name]
    shapes = [(queries, heads), (keys, shared), (keys, shared), (queries, heads)]
    given = [drawn(batch, n, h, width, seed=i).to(dtype).transpose(1, 2) for i, (n, h) in enumerate(shapes)]
    return given, causal


def ours(given, mask=None, causal=False):
    query, key, value, grad = given
    scale = query.shape[-1] ** -0.5
    made = kernel.forward(query, key, value, mask, causal, scale)
    return [made, *kernel.backward(grad, query, key, value, mask, causal, scale)]


def through(function, given, mask=None, causal=False):
    called = functools.partial(function, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return differentiated(called, given[:3], grad=given[3])


def exact(given, mask=None, causal=False):
    given, mask = [t.double() for t in given], None if mask is None else mask.double()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return through(F.scaled_dot_product_attention, given, mask, causal)


def assert_as_exact_as_torchs(given, mask=None, causal=False):
    wanted = exact(given, mask, causal)
    torchs = errors(through(F.scaled_dot_product_attention, given, mask, causal), wanted)
    for error, theirs in zip(errors(ours(given, mask, causal), wanted), torchs, strict=True):
        assert error <= max(1.1 * theirs, 0.003)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_as_exact_as_torchs_kernel(name):
    given, causal = operands(name)
    assert_as_exact_as_torchs(given, causal=causal)


def _masks(batch, heads, queries, keys):
    seen = drawn(batch, 1, queries, keys, seed=7) > -0.5
    hidden = torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)
    return {
        "fp32": drawn(batch, heads, queries, keys, seed=8),
        "bf16": drawn(batch, heads, queries, keys, seed=8).bfloat16(),
        "fp64": drawn(1, 1, queries, keys, seed=8).double(),
        "of two dimensions": drawn(queries, keys, seed=8),
        "of rows": drawn(batch, 1, queries, 1, seed=8),
        "of keys": drawn(batch, 1, 1, keys, seed=8),
        "columns side by side": drawn(batch, 1, keys, queries, seed=8).mT,
        "hidden": hidden,
    }


MASKS_SEEN = [name for name in _masks(1, 1, 1, 1) if name != "hidden"]


def with_mask(given, mask):
    query, key, value, grad = given
    return kernel.backward_with_mask(grad, query, key, value, mask, False, query.shape[-1] ** -0.5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", ["a bit of each", "several chunks of queries"])
@pytest.mark.parametrize("kind", MASKS_SEEN)
def test_gradients_of_every_mask(kind, size):
    given, _ = operands(size)
    batch, heads, _, queries, keys, *_ = SIZES[size]
    mask = _masks(batch, heads, queries, keys)[kind]
    found = with_mask(given, mask)
    assert all(map(torch.equal, found[:3], ours(given, mask)[1:]))
    wide = mask.double().requires_grad_()
    (wanted,) = torch.autograd.grad(through_mask(given, wide), wide, given[3].double())
    assert (found[3].dtype, found[3].shape) == (mask.dtype, mask.shape)
    # What is added to all scores of a row has none: all is error, of what it is the sum of.
    least = 0.1 if kind == "of rows" else 0
    assert (found[3].double() - wanted).norm() <= 0.004 * max(wanted.norm(), least * given[3].double().norm())


def through_mask(given, mask):
    query, key, value = (t.double() for t in given[:3])
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return (query @ key.mT * query.shape[-1] ** -0.5 + mask).softmax(-1) @ value


def dropped(given, causal, p, seed=3):
    """What a kernel that drops gives, in ours and in fp64 with torch's noise; and what is drawn next."""
    query, key, value, grad = given
    shape = (*query.shape[:3], key.shape[2])
    torch.manual_seed(seed)
    kept = dropout_bits.dropout_bits(query[..., 0], p, key.shape[2])
    following = [torch.rand(3)]
    call = (query, key, value, None, causal, query.shape[-1] ** -0.5, kept, p)
    found = [kernel.forward(*call), *kernel.backward(grad, *call)]
    torch.manual_seed(seed)
    noise = torch.empty(shape, dtype=torch.float64).bernoulli_(1 - p).div_(1 - p)
    following.append(torch.rand(3))
    wide = [t.double().requires_grad_() for t in given[:3]]
    k, v = (t.repeat_interleave(shape[1] // t.shape[1], 1) for t in wide[1:])
    scores = wide[0] @ k.mT * call[5]
    if causal:
        scores = scores.masked_fill(torch.ones(shape[2:]).tril().logical_not(), -math.inf)
    out = (scores.softmax(-1) * noise) @ v
    return found, [out.detach(), *torch.autograd.grad(out, wide, grad.double())], following


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("name", SIZES)
def test_what_is_dropped_is_what_torch_drops(name, p):
    given, causal = operands(name)
    found, wanted, following = dropped(given, causal, p)
    assert max(errors(found, wanted)) < 0.004
    assert torch.equal(*following)
    control = dropped(given, causal, p, seed=4)[1]
    assert min(errors(found, control)) > 0.05, "control: other draws are seen"


@pytest.mark.parametrize("name", ["a narrow last panel", "several chunks of queries"])
def test_any_layout_gives_the_same_bits(name):
    given, causal = operands(name)
    wanted = ours(given, causal=causal)
    odd = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (t.contiguous() for t in given)]
    behind = [F.pad(t.contiguous(), (1, 2))[..., 1:-2] for t in given]
    turned = [*given[:3], given[3].mT.contiguous().mT]
    for same in ([t.contiguous() for t in given], odd, behind, turned):
        assert all(torch.equal(a, b) for a, b in zip(ours(same, causal=causal), wanted, strict=True))


def test_threads_do_not_change_bits():
    given, _ = operands("several chunks of queries")
    one = ours(given)
    torch.set_num_threads(2)
    assert all(map(torch.equal, one, ours(given)))


def test_torchs_own_kernels_find_the_matrix_units_as_they_left_them():
    """oneDNN and torch remember how they configured tiles; a process whose tiles are not theirs dies."""
    given, _ = operands("several chunks of queries")
    weight = drawn(48, 80, seed=5).bfloat16()

    def torchs():
        return [
            F.scaled_dot_product_attention(*given[:3], enable_gqa=True),
            *(drawn(n, 80).bfloat16() @ weight.T for n in (5, 64)),
        ]

    wanted, first = torchs(), ours(given)
    for _ in range(3):
        assert all(map(torch.equal, torchs(), wanted))
        assert all(map(torch.equal, ours(given), first))


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_rows_that_are_no_numbers_stay_alone(what):
    """As by arithmetic; torch's kernel makes zeros of a row of NaNs."""
    given, _ = operands("a bit of each")
    given[0][0, 1, 3, 4] = what
    made = ours(given)[0]
    assert torch.equal(made.isnan(), exact(given)[0].isnan())
    assert made[0, 1, 3].isnan().all()
    assert made.isfinite().sum() == made.numel() - made.shape[-1]


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    given, _ = operands("a bit of each")
    mask = torch.zeros(2, 1, 7, 5)
    mask[0, 0, 2] = -math.inf
    made, grad_query, grad_key, grad_value = ours(given, mask)
    assert not made[0, :, 2].any()
    assert not grad_query[0, :, 2].any()
    given[3][0, :, 2] = 1e30  # what nobody sees
    assert all(
        torch.equal(a, b) for a, b in zip(ours(given, mask)[1:], (grad_query, grad_key, grad_value), strict=True)
    )


def test_large_scores_do_not_overflow():
    given, _ = operands("one tile")
    given[0] *= 1e4
    found, wanted = ours(given), exact(given)
    assert all(t.isfinite().all() for t in found)
    assert errors(found, wanted)[0] < 0.01


def test_what_it_does_not_take():
    (query, key, value, _), _ = operands("a bit of each")
    assert kernel.takes(query, key, value)
    others = [
        (query.float(), key, value),
        (query, key.half(), value),
        (query[..., :33], key[..., :33], value[..., :33]),  # pairs of an odd width
        (query, key, value[:, :, :4]),
        (query, key[:, :2], value[:, :2]),  # 3 heads for 2
        (query, key[:1], value[:1]),
    ]
    assert [kernel.takes(*given) for given in others] == [False] * len(others)

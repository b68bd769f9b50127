"""Attention in compiled C: every size, layout and mask against fp64, and what is no number stays where it belongs."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.native.jit_compiler import PARTS
from amp_graph.passes.native.kernel_table import typed
from amp_graph.passes.torch_compat import autograd
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


TORCHS, CAUSAL = F.scaled_dot_product_attention, {"is_causal": True}
# batch, heads, heads of keys, queries, keys, width; and what else it is called with
CASES = {
    "one tile": ((1, 2, 2, 6, 64, 16), {}),
    "a bit of each": ((2, 3, 3, 7, 5, 34), {}),
    "one query": ((2, 4, 2, 1, 300, 64), {}),
    "a panel and a half of the width": ((1, 2, 1, 40, 70, 96), {}),
    "a narrow last panel": ((1, 2, 2, 33, 130, 66), CAUSAL),
    "several chunks of queries": ((1, 4, 2, 600, 90, 32), {}),
    "several chunks, causal": ((1, 2, 2, 530, 530, 64), CAUSAL),
    "more keys than queries, causal": ((1, 2, 2, 20, 200, 64), CAUSAL),
    "more queries than keys, causal": ((1, 4, 1, 300, 70, 128), CAUSAL),
    "a tile of keys across panels, causal": ((2, 2, 1, 64, 66, 30), CAUSAL),
    "a part of a tile behind the last query, causal": ((1, 4, 1, 63, 127, 32), CAUSAL),
    "one head of keys for all": ((3, 4, 1, 24, 24, 16), {"enable_gqa": False}),  # which torch's kernel does not take
}
PLAIN = (3, 4, 4, 32, 40, 16)
SEEN = drawn(3, 1, 32, 40, seed=7) > -0.5
FORMS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": SEEN},
    "bool mask of rows": {"attn_mask": SEEN[:, :, :1]},
    "bool mask of two dimensions": {"attn_mask": SEEN[0, 0]},
    "float mask": {"attn_mask": drawn(3, 4, 32, 40, seed=8)},
    "low float mask": {"attn_mask": drawn(1, 4, 32, 40, seed=8).bfloat16()},
    "rows that see nothing": {"attn_mask": SEEN & (drawn(3, 1, 32, 1, seed=9) > 0)},
}
CASES |= {name: (PLAIN, options) for name, options in FORMS.items()}


def operands(name, magnitude=1.0):
    """Query, key and value, with the heads of a row side by side as linears leave them, and the result's gradient."""
    batch, heads, shared, queries, keys, width = CASES[name][0]
    shapes = [(queries, heads), (keys, shared), (keys, shared), (queries, heads)]
    given = [drawn(batch, n, h, width, seed=i).transpose(1, 2) for i, (n, h) in enumerate(shapes)]
    return [(t * magnitude if i < 2 else t).to(BF16) for i, t in enumerate(given)]


def step(function, name, given, dtype=BF16, **more):
    """Result and gradients; in fp64, with a mask of fp64 where it is one of numbers."""
    options = {"enable_gqa": True} | CASES[name][1] | more
    if dtype == torch.float64 and "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].double()
    return differentiated(partial(function, **options), given[:3], dtype, grad=given[3])


def compared(name, magnitude=1.0):
    """Torch's kernel's results, ours, and the errors of each against fp64."""
    given = operands(name, magnitude)
    found = [step(*how) for how in ((TORCHS, name, given), (attention_low, name, given))]
    exact = step(TORCHS, name, given, torch.float64)
    return *found, *(errors(one, exact) for one in found)


@pytest.mark.parametrize(
    ("name", "magnitude"), [*((n, 1.0) for n in CASES), *((n, m) for n in FORMS for m in (0.1, 3))]
)
def test_every_size_and_form_is_as_exact_as_torchs_kernel(name, magnitude):
    torchs, ours, theirs, found = compared(name, magnitude)
    assert [(t.shape, t.dtype) for t in ours] == [(t.shape, t.dtype) for t in torchs]
    assert ours[0].stride() == torchs[0].stride() or "for all" in name
    assert all(error <= max(1.1 * other, 0.003) for error, other in zip(found, theirs, strict=True))


def test_control_a_forgotten_scale_is_seen(monkeypatch):
    backward = kernel.backward
    monkeypatch.setattr(kernel, "backward", lambda *given: backward(*given[:6], 1.0, *given[7:]))
    assert max(compared("plain")[3]) > 0.01


def test_gradients_that_could_not_be_compiled_are_those_of_products(monkeypatch):
    compiled = step(attention_low, "one tile", operands("one tile"))
    monkeypatch.setattr(kernel, "backward_library", lambda: None)
    for one, other in zip(compiled[1:], step(attention_low, "one tile", operands("one tile"))[1:], strict=True):
        assert not torch.equal(one, other)  # by other sums
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)


def _masks(batch, heads, queries, keys):
    return {
        "fp32": drawn(batch, heads, queries, keys, seed=8),
        "bf16": drawn(batch, heads, queries, keys, seed=8).bfloat16(),
        "fp64": drawn(1, 1, queries, keys, seed=8).double(),
        "of two dimensions": drawn(queries, keys, seed=8),
        "of rows": drawn(batch, 1, queries, 1, seed=8),
        "of keys": drawn(batch, 1, 1, keys, seed=8),
        "columns side by side": drawn(batch, 1, keys, queries, seed=8).mT,
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", ["a bit of each", "several chunks of queries"])
@pytest.mark.parametrize("kind", _masks(1, 1, 1, 1))
def test_gradients_of_every_mask(kind, size):
    *given, grad = operands(size)
    (batch, heads, _, queries, keys, _), _ = CASES[size]
    given.append(_masks(batch, heads, queries, keys)[kind])
    called = [lambda q, k, v, m, f=f: f(q, k, v, m, enable_gqa=True) for f in (attention_low, TORCHS)]
    found = differentiated(called[0], given, grad=grad)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = differentiated(called[1], given, torch.float64, grad=grad)
    assert (found[4].dtype, found[4].shape) == (given[3].dtype, given[3].shape)
    assert max(errors(found[:4], exact[:4])) < 0.005
    # What is added to all scores of a row has none: all is error, of what it is the sum of.
    least = 0.1 * grad.double().norm() if kind == "of rows" else 0
    assert (found[4].double() - exact[4]).norm() <= 0.004 * max(exact[4].norm(), least)


def penalty(function, *leaves, **options):
    """What has the first derivatives of ``function`` in it."""
    first = torch.autograd.grad(function(*leaves, **options).sin().sum(), leaves, create_graph=True)
    return sum(g.double().square().sum() for g in first)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "of keys"])
def test_second_derivatives_of_masks_that_train(kind):
    given = [*operands("plain")[:3], _masks(3, 4, 32, 40)[kind]]
    found = differentiated(partial(penalty, attention_low), given)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = differentiated(partial(penalty, TORCHS), given, torch.float64)
    assert max(errors(found[1:], exact[1:])) < 0.03


def seeded(function, seed=11):
    def call(*given, **options):
        torch.manual_seed(seed)
        return function(*given, **options)

    return call


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_dropout_draws_as_torchs(name):
    """Torch computes it in fp32, with a rounding at the end."""
    given, following, p = operands(name), [], 0.5 if "causal" in name else 0.2
    exact = step(seeded(TORCHS), name, given, torch.float64, dropout_p=p)
    following.append(torch.rand(3))
    ours = step(seeded(attention_low), name, given, dropout_p=p)
    following.append(torch.rand(3))
    assert max(errors(ours, exact)) < 0.005
    assert torch.equal(*following), "what is drawn behind it"
    with torch.no_grad():
        call = partial(seeded(attention_low), dropout_p=p, **{"enable_gqa": True} | CASES[name][1])
        assert torch.equal(call(*given[:3]), ours[0])
    control = step(seeded(TORCHS, 12), name, given, torch.float64, dropout_p=p)
    assert min(errors(ours, control)) > 0.05, "control: other draws are seen"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("name", FORMS)
def test_second_derivatives(name, p):
    given = [*operands(name)[:3], torch.ones(())]
    found = step(partial(penalty, seeded(attention_low)), name, given, dropout_p=p)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = step(partial(penalty, seeded(TORCHS)), name, given, torch.float64, dropout_p=p)
    assert max(errors(found[1:], exact[1:])) < 0.03


def test_an_added_mask_that_no_kernel_of_ours_takes_trains_by_the_formula(monkeypatch):
    """Torch's kernel saves the log-sum-exp of a row alone: of a row that sees nothing, the scores are lost."""
    monkeypatch.setattr(kernel, "takes", lambda *given: False)
    given, mask = operands("plain"), torch.zeros(32, 40).masked_fill(drawn(32, 1) > 0, torch.finfo(BF16).min)

    def formula(q, k, v, **_):
        return (q @ k.mT * q.shape[-1] ** -0.5 + mask.double()).softmax(-1) @ v

    exact = step(formula, "plain", given, torch.float64)
    ours, torchs = (step(f, "plain", given, attn_mask=mask.to(BF16)) for f in (attention_low, TORCHS))
    assert max(errors(ours, exact)) < 0.01
    assert max(errors(torchs, exact)) > 0.05


def test_any_layout_and_number_of_threads_gives_the_same_bits():
    for name in ("a narrow last panel", "several chunks of queries"):
        given = operands(name)
        wanted, last = step(attention_low, name, given), [t.shape[-1] for t in given]
        odd = [torch.cat([t, t], -1)[..., :n] for t, n in zip(given, last, strict=True)]
        behind = [F.pad(t.contiguous(), (1, 2))[..., 1:-2] for t in given]
        turned = [*given[:3], given[3].mT.contiguous().mT]
        for same in (given, [t.contiguous() for t in given], odd, behind, turned):
            assert all(map(torch.equal, step(attention_low, name, same), wanted))
            torch.set_num_threads(2)


def test_torchs_own_kernels_find_the_matrix_units_as_they_left_them():
    """oneDNN and torch remember how they configured tiles; a process whose tiles are not theirs dies."""
    name = "several chunks of queries"
    given, weight = operands(name), drawn(48, 80, seed=5).bfloat16()

    def torchs():
        products = [drawn(n, 80).bfloat16() @ weight.T for n in (5, 64)]
        return [TORCHS(*given[:3], enable_gqa=True), *products]

    wanted, first = torchs(), step(attention_low, name, given)
    for _ in range(3):
        assert all(map(torch.equal, torchs(), wanted))
        assert all(map(torch.equal, step(attention_low, name, given), first))


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_rows_that_are_no_numbers_stay_alone(what):
    """As by arithmetic; torch's kernel makes zeros of a row of NaNs."""
    given = operands("a bit of each")
    given[0][0, 1, 3, 4] = what
    found = step(attention_low, "a bit of each", given)[0].isnan()
    assert found[0, 1, 3].all()
    assert found.sum() == found.shape[-1]


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient():
    name, mask = "a bit of each", torch.zeros(2, 1, 7, 5)
    mask[0, 0, 2] = -math.inf
    given = operands(name)
    found = step(attention_low, name, given, attn_mask=mask)
    assert not any(t[0, :, 2].any() for t in found[:2])
    given[3][0, :, 2] = 1e30  # what nobody sees
    assert all(map(torch.equal, step(attention_low, name, given, attn_mask=mask), found))


def test_large_scores_do_not_overflow():
    given = operands("one tile", 1e2)
    found, exact = step(attention_low, "one tile", given), step(TORCHS, "one tile", given, torch.float64)
    assert all(t.isfinite().all() for t in found)
    assert errors(found, exact)[0] < 0.01


def test_what_it_does_not_take():
    query, key, value, _ = operands("a bit of each")
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


def test_tensors_that_stand_for_others_go_to_torch(monkeypatch):
    """Wrapper subclasses have no memory of their own; calls inside of transforms are torch's, too."""
    monkeypatch.setattr(autograd, "is_wrapper", lambda t: True)
    monkeypatch.setattr(kernel, "forward", None)
    given = operands("plain")[:3]
    assert torch.equal(attention_low(*given), TORCHS(*given))

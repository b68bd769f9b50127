"""A residual sum and its norm in one pass of C: as exact as torch's fp32 norm and a cast, by fp64, in all forms."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.norm import add_norm_functions, add_norm_kernel
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cpu.norm.add_norm_kernel import OPS
from amp_graph.passes.casts.shared_cast import shared_cast
from amp_graph.passes.native import jit_compiler

pytestmark = pytest.mark.compiled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
# Rows and widths around those of vectors (16), blocks (128 rows), and columns that are summed in fp32 (4,096).
SHAPES = ((1, 1), (3, 5), (7, 16), (129, 33), (2, 3, 384), (300, 50), (2, 4100), (1, 9001))


def drawn(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(shape, low=BF16, weights=FP32, mean=0.0):
    """x, branch, weight and bias."""
    width = shape[-1]
    return (
        drawn(*shape) + mean,
        drawn(*shape, seed=1, dtype=low),
        (drawn(width, seed=2) + 1).to(weights),
        drawn(width, seed=3, dtype=weights),
    )


def ours(given, low=BF16, readers=1, full=True, keep=True, eps=EPS):
    x, branch, weight, bias = given
    shape = x.shape[-1:] if weight is None else weight.shape
    return add_norm(x, branch, shape, weight, bias, eps, low, readers, full, keep)


def torchs(given, low=BF16, readers=1, full=True, keep=True, eps=EPS):
    """The same as graphs without the pass compute it; in fp64 without any rounding."""
    x, branch, weight, bias = given
    shape = x.shape[-1:] if weight is None else weight.shape
    total = x if branch is None else x + branch
    weight, bias = (None if t is None else t.to(total.dtype) for t in (weight, bias))
    normed = F.layer_norm(total, shape, weight, bias, eps)
    if x.dtype == torch.float64:
        return (total,) * keep + (normed,) * (full + readers)
    return (total,) * keep + (shared_cast(normed, low, readers, full) if readers else (normed,))


def step(function, given, low=BF16, **options):
    """Results, and the gradients of all inputs for cotangents in the results' dtypes."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    results = function(leaves, low=low, **options)
    keep, full, readers = (options.get(k, v) for k, v in (("keep", True), ("full", True), ("readers", 1)))
    dtypes = [FP32] * (keep + full) + [low] * readers
    grads = [
        drawn(*r.shape, seed=10 + i, dtype=d).to(r.dtype) for i, (r, d) in enumerate(zip(results, dtypes, strict=True))
    ]
    wanted = [t for t in leaves if t is not None]
    return [r.detach() for r in results], list(torch.autograd.grad(results, wanted, grads))


def wide(given):
    return [None if t is None else t.double() for t in given]


def compared(given, low=BF16, **options):
    """(results, gradients) of ours, of torch's operations, and of fp64."""
    exact = step(torchs, wide(given), low=low, **options)
    return step(ours, given, low=low, **options), step(torchs, given, low=low, **options), exact


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def is_rounded_once(got, exact):
    """Whether each element is what its precision has nearest to a number that is as near to the exact one as fp32."""
    info = torch.finfo(got.dtype)
    place = torch.exp2(exact.abs().clamp_min(info.tiny).log2().floor()) * info.eps
    return bool(((got.double() - exact).abs() <= 0.5 * place + 5e-7 * exact.abs().max()).all())


def assert_as_exact(got, torchs, exact):
    """Each tensor is of torch's dtype and shape, and no farther from fp64; what is low is rounded once."""
    for mine, other, true in zip(got, torchs, exact, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        assert error(mine, true) <= 1.02 * error(other, true) + 3e-7, (error(mine, true), error(other, true))
        assert mine.dtype == FP32 or is_rounded_once(mine, true)


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_as_exact_as_torchs(shape, low):
    mine, other, exact = compared(inputs(shape, low), low, readers=2)
    assert torch.equal(mine[0][0], other[0][0]), "the sum is bit-exact"
    for i in range(2):
        assert_as_exact(mine[i], other[i], exact[i])


FORMS = [f for f in itertools.product((True, False), (0, 1, 3), (True, False), (True, False)) if f[1] or f[2]]


@pytest.mark.parametrize(("branch", "readers", "full", "keep"), FORMS)
def test_every_form_has_its_results_and_gradients(branch, readers, full, keep):
    x, added, weight, bias = inputs((40, 50))
    given = (x, added if branch else None, weight, bias)
    mine, other, exact = compared(given, readers=readers, full=full, keep=keep)
    assert len(mine[0]) == keep + full + readers
    for i in range(2):
        assert_as_exact(mine[i], other[i], exact[i])


@pytest.mark.parametrize("which", [(2,), (3,), (2, 3)], ids=["no weight", "no bias", "neither"])
def test_norms_without_parameters(which):
    given = [None if i in which else t for i, t in enumerate(inputs((40, 50)))]
    mine, other, exact = compared(given)
    for i in range(2):
        assert_as_exact(mine[i], other[i], exact[i])


@pytest.mark.parametrize("kinds", list(itertools.product((FP32, BF16), repeat=3)), ids=str)
def test_every_mix_of_precisions(kinds):
    """x, branch and weights, each in fp32 and low; a sum of two low ones is rounded, as torch rounds it."""
    x, branch, weight, bias = inputs((40, 50))
    given = (x.to(kinds[0]), branch.to(kinds[1]), weight.to(kinds[2]), bias.to(kinds[2]))
    leaves = [t.clone().requires_grad_() for t in given]
    total, full, low = ours(leaves)
    assert torch.equal(total, given[0] + given[1])
    exact = F.layer_norm(total.double(), (50,), *wide(given[2:]), EPS)
    assert error(full.detach(), exact.detach()) < 3e-7
    assert is_rounded_once(low.detach(), exact.detach())
    grads = torch.autograd.grad(
        (total, full, low), leaves, [torch.ones_like(total), drawn(40, 50), drawn(40, 50, dtype=BF16)]
    )
    assert [g.dtype for g in grads] == [t.dtype for t in given]
    truth = [t.double().requires_grad_() for t in given]
    out = truth[0] + truth[1]
    out = out + (total.double() - out).detach()
    normed = F.layer_norm(out, (50,), *truth[2:], EPS)
    expected = torch.autograd.grad(
        (out, normed), truth, [torch.ones_like(out), drawn(40, 50).double() + drawn(40, 50, dtype=BF16)]
    )
    for got, true in zip(grads, expected, strict=True):
        assert error(got, true) < (3e-7 if got.dtype == FP32 else 3e-3)
        assert got.dtype == FP32 or is_rounded_once(got, true)


def test_norms_over_several_dimensions():
    shape = (5, 4, 3, 7)
    given = (drawn(*shape), drawn(*shape, seed=1, dtype=BF16), drawn(3, 7, seed=2), drawn(3, 7, seed=3))
    mine, other, exact = compared(given)
    for i in range(2):
        assert_as_exact(mine[i], other[i], exact[i])


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(shape):
    results, grads = step(ours, inputs(shape))
    assert [r.shape for r in results] == [torch.Size(shape)] * 3
    assert all(not g.any() for g in grads)
    assert [tuple(g.shape) for g in grads] == [shape, shape, (8,), (8,)]


def test_inputs_and_gradients_that_lie_otherwise():
    x, branch, weight, bias = inputs((6, 9, 50))
    given = (x.transpose(0, 1), branch.transpose(0, 1), torch.stack([weight, bias], 1)[:, 0], bias.expand(50))
    assert not any(t.is_contiguous() for t in given[:3])
    leaves = [t.detach().requires_grad_() for t in given]
    results = ours(leaves, readers=1)
    grads = [drawn(1, 1, 1).expand_as(results[0]), drawn(6, 9, 50).transpose(0, 1), drawn(9, 6, 50, dtype=BF16)]
    got = torch.autograd.grad(results, leaves, grads)
    straight = [t.contiguous().requires_grad_() for t in given]
    expected = torch.autograd.grad(ours(straight), straight, [g.contiguous() for g in grads])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 127, 1000])
def test_threads_change_nothing_that_is_written_row_by_row(rows, monkeypatch):
    monkeypatch.setattr(jit_compiler, "LEAST_OF_A_THREAD", 64)
    given, found = inputs((rows, 50)), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            found.append(step(ours, given, readers=3))
        finally:
            torch.set_num_threads(1)
    for results, grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(grads[:2], found[0][1][:2], strict=True))
        for a, b in zip(grads[2:], found[0][1][2:], strict=True):
            assert error(a, b.double()) < 1e-7


def test_gradients_of_weights_over_many_rows():
    """Where the CPU's own kernel on bf16 loses up to 42 % of them, and an fp32 sum row by row some 1e-6."""
    given = (drawn(30_000, 8) + 3, None, drawn(8, seed=2), drawn(8, seed=3))
    mine, _, exact = compared(given, keep=False, full=False)
    _, (_, dweight, dbias) = step(
        lambda g, **_: (F.layer_norm(g[0].bfloat16(), (8,), *g[2:], EPS),), given, full=False, keep=False
    )
    for got, lost, true in zip(mine[1][1:], (dweight, dbias), exact[1][1:], strict=True):
        assert error(got, true) < 2e-6
        assert error(lost, true) > 1e-2


def test_a_mean_that_is_large_beside_the_deviation():
    mine, other, exact = compared(inputs((40, 384), mean=1000.0))
    for got, torchs_own, true in zip(mine[0] + mine[1], other[0] + other[1], exact[0] + exact[1], strict=True):
        assert error(got, true) <= 1.02 * error(torchs_own, true) + 3e-7


def test_what_is_not_finite_stays_in_its_row():
    x, branch, weight, bias = inputs((4, 50))
    x[1, 3], x[2, 7] = torch.inf, torch.nan
    total, full, low = ours((x, branch, weight, bias))
    assert low[0].isfinite().all()
    assert low[3].isfinite().all()
    assert full[1:3].isnan().all()
    assert low[1:3].isnan().all()
    assert torch.equal(total.isnan(), x.isnan())


def test_rows_that_are_constant_have_no_deviation():
    x = torch.full((3, 50), 7.0)
    _, full, low = ours((x, None, None, None))
    assert not full.any()
    assert not low.any()


# -- derivatives of derivatives, and transforms -----------------------------------------------------------------


def penalty(function, given, **options):
    """The gradient of a penalty on gradients, for all inputs that it depends on."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    wanted = [t for t in leaves if t is not None]
    results = function(leaves, **options)
    first = torch.autograd.grad(sum(r.double().sin().sum() for r in results), wanted, create_graph=True)
    return torch.autograd.grad(sum(g.double().square().sum() for g in first), wanted, allow_unused=True)


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_second_derivatives(branch, keep):
    x, added, weight, bias = inputs((20, 30))
    given = (x, added if branch else None, weight, bias)
    mine, other, exact = (penalty(f, g, keep=keep) for f, g in ((ours, given), (torchs, given), (torchs, wide(given))))
    for got, torchs_own, true in zip(mine, other, exact, strict=True):
        assert error(got, true) <= 1.1 * error(torchs_own, true) + 1e-6


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode_and_vmap_take_torchs_way():
    given = inputs((6, 30))
    tangents = tuple(drawn(*t.shape, seed=20 + i, dtype=t.dtype) for i, t in enumerate(given))
    for function in (
        lambda f: torch.func.jvp(lambda *g: f(g), given, tangents)[1],
        lambda f: torch.vmap(lambda a, b: f((a, b, *given[2:])))(*given[:2]),
    ):
        for got, expected in zip(function(ours), function(torchs), strict=True):
            assert torch.equal(got, expected)


def test_gradients_in_batches():
    leaves = [t.requires_grad_() for t in inputs((6, 30))]
    _, _, low = ours(leaves)
    grads = drawn(4, 6, 30, dtype=BF16)
    got = torch.autograd.grad(low, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(grads):
        for a, b in zip(got, torch.autograd.grad(low, leaves, one, retain_graph=True), strict=True):
            assert error(a[i], b.double()) < (3e-6 if b.dtype == FP32 else 3e-3)


def test_what_needs_no_gradient_gets_none():
    x, branch, weight, bias = inputs((6, 30))
    for wanted in (x, branch, weight, bias):
        leaves = [t.clone().requires_grad_(t is wanted) for t in (x, branch, weight, bias)]
        (got,) = torch.autograd.grad(ours(leaves)[2].float().sum(), [t for t in leaves if t.requires_grad])
        assert got.shape == wanted.shape
    with torch.no_grad():
        assert not any(t.requires_grad for t in ours((x.requires_grad_(), branch, weight, bias)))


def test_the_sum_alone_has_the_gradient_of_a_sum():
    leaves = [t.requires_grad_() for t in inputs((6, 30))]
    total, _, _ = ours(leaves)
    dx, dbranch, dweight, dbias = torch.autograd.grad(total, leaves, drawn(6, 30), allow_unused=True)
    assert torch.equal(dx, drawn(6, 30))
    assert torch.equal(dbranch, drawn(6, 30, dtype=BF16))
    assert dweight is None
    assert dbias is None


def test_hooks_on_saved_tensors_see_what_is_saved():
    given, seen = [t.requires_grad_() for t in inputs((6, 30))], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        results = ours(given)
    assert seen == [(6, 30), (2, 6), (30,), (30,)], "the sum, statistics and parameters; no norm"
    grads = torch.autograd.grad(results[2].float().sum(), given)
    again = torch.autograd.grad(ours(given)[2].float().sum(), given)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_writing_to_a_saved_sum_is_an_error():
    given = [t.requires_grad_() for t in inputs((6, 30))]
    total, _, low = ours(given)
    with torch.no_grad():
        total += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        low.float().sum().backward()


# -- as operators ------------------------------------------------------------------------------------------------


def test_operators_say_on_fake_tensors_what_they_return():
    x, branch, weight, bias = inputs((6, 30))
    for low, full in ((True, True), (True, False), (False, True)):
        given = (x, branch, weight, bias, 30, EPS, BF16, low, full, True)
        torch.library.opcheck(OPS.residual_norm.default, given, test_utils=("test_schema", "test_faketensor"))
    stats = OPS.residual_norm(x, branch, weight, bias, 30, EPS, BF16, True, False, True)[0]
    for wants in itertools.product((True, False), repeat=4):
        given = ([branch, x], x, x, stats, weight, 30, BF16, *wants, True)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(OPS.residual_norm_backward.default, given, test_utils=checks)


def test_a_tracer_sees_one_operator_each_way():
    from torch.fx.experimental.proxy_tensor import make_fx

    def both_ways(*given):
        leaves = [t.detach().requires_grad_() for t in given]
        return torch.autograd.grad(ours(leaves)[2].float().sum(), leaves)

    traced = make_fx(both_ways, tracing_mode="fake")(*inputs((6, 30)))
    names = [str(n.target) for n in traced.graph.nodes if "residual_norm" in str(n.target)]
    assert names == ["amp_graph.residual_norm.default", "amp_graph.residual_norm_backward.default"]
    got, expected = traced(*inputs((6, 30))), both_ways(*inputs((6, 30)))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# -- controls: what these tests would see ------------------------------------------------------------------------


def test_control_a_norm_rounded_before_its_weights_is_seen(monkeypatch):
    def twice(x, branch, weight, bias, width, eps, *rest):
        stats, total, low = add_norm_kernel.residual_norm(x, branch, None, None, width, eps, *rest)
        return [stats, total, low * weight.bfloat16() + bias.bfloat16()]

    monkeypatch.setattr(add_norm_functions, "residual_norm", twice)
    mine, other, exact = compared(inputs((129, 33)), full=False)
    with pytest.raises(AssertionError):
        assert_as_exact(mine[0], other[0], exact[0])


def test_control_a_forgotten_residual_gradient_is_seen(monkeypatch):
    kernel = add_norm_kernel.residual_norm_backward
    monkeypatch.setattr(
        add_norm_functions, "residual_norm_backward", lambda grads, _, *rest: kernel(grads, None, *rest)
    )
    mine, other, exact = compared(inputs((129, 33)))
    with pytest.raises(AssertionError):
        assert_as_exact(mine[1], other[1], exact[1])


# -- RMS norms ---------------------------------------------------------------------------------------------------


def rms(given, low=BF16, readers=1, full=True, keep=True):
    x, branch, weight, _ = given
    return add_norm(x, branch, x.shape[-1:], weight, None, EPS, low, readers, full, keep, centered=False)


def torchs_rms(given, low=BF16, readers=1, full=True, keep=True):
    x, branch, weight, _ = given
    total = x if branch is None else x + branch
    normed = F.rms_norm(total, x.shape[-1:], weight, EPS)
    if x.dtype == torch.float64:
        return (total,) * keep + (normed,) * (full + readers)
    return (total,) * keep + shared_cast(normed, low, readers, full)


@pytest.mark.parametrize("which", [(3,), (1, 3), (2, 3)], ids=["all", "no branch", "no weight"])
def test_rms_norms(which):
    given = [None if i in which else t for i, t in enumerate(inputs((129, 33), mean=0.5))]
    mine, other, exact = (
        step(f, g, readers=2) for f, g in ((rms, given), (torchs_rms, given), (torchs_rms, wide(given)))
    )
    for i in range(2):
        assert_as_exact(mine[i], other[i], exact[i])
    second = [penalty(f, g) for f, g in ((rms, given), (torchs_rms, given), (torchs_rms, wide(given)))]
    for got, torchs_own, true in zip(*second, strict=True):
        assert error(got, true) <= 1.1 * error(torchs_own, true) + 1e-6

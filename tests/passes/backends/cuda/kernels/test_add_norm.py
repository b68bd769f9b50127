"""A residual sum, a norm and their casts by Triton: values and gradients of torch's fp32 operations, rounded once."""

import pytest
import torch

from amp_graph.passes.backends.cpu.norm.add_norm_by_torch import norm_by_torch
from amp_graph.passes.backends.cpu.norm.add_norm_functions import add_norm
from amp_graph.passes.backends.cuda.kernels import add_norm as kernels
from amp_graph.passes.native import kernel_table, triton_loader
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run, round_as_gpus_do

pytestmark = [mark_where_they_run(), pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]  # numpy's
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    monkeypatch.setitem(kernel_table._loaders, f"add_norm on {DEVICE}", kernels.kernels)
    monkeypatch.setattr(triton_loader, "_failed", {})
    monkeypatch.setattr(kernels, "_multiprocessors", lambda device: 2)  # several rows a program
    round_as_gpus_do(monkeypatch)
    yield
    assert not gave_up()


def drawn(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def reference(x, branch, weight, bias, width, centered, dtype=torch.float64):
    """The sum in the wider dtype of its parts, then a norm in ``dtype``."""
    total = x if branch is None else x + branch
    rows = total.to(dtype)
    rows = rows - rows.mean(-1, keepdim=True) if centered else rows
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS)
    rows = rows if weight is None else rows * weight.to(dtype)
    return total, rows if bias is None else rows + bias.to(dtype)


def run(function, given, grads, grad_sum):
    """Results and gradients of ``function(x, branch, weight, bias)`` -> sum, norm in low, ..., norm in fp32."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
    total, *normed = function(*leaves)
    wanted = [t for t in leaves if t is not None]
    outs = [total, *normed]
    made = torch.autograd.grad(outs, wanted, [g.to(o.dtype) for g, o in zip([grad_sum, *grads], outs, strict=True)])
    return [t.detach() for t in (total, normed[0])] + list(made)


def error(got, exact):
    size = exact.double().norm()
    return ((got.double() - exact.double()).norm() / size).item() if size else float(got.double().norm())


def check(given, low, readers=2, centered=True, atol=0.0):
    width = given[0].shape[-1]
    grads = [drawn(*given[0].shape, dtype=low, seed=20 + i) for i in range(readers)] + [drawn(*given[0].shape, seed=9)]
    grad_sum = drawn(*given[0].shape, seed=8)

    def ours(x, branch, weight, bias):
        total, wide, *lows = add_norm(x, branch, (width,), weight, bias, EPS, low, readers, True, True, centered)
        return total, *lows, wide

    def torchs(x, branch, weight, bias, dtype=FP32):
        total, wide = reference(x, branch, weight, bias, width, centered, dtype)
        return total, *[wide.to(low) for _ in range(readers)], wide

    def exact(*given):
        total, *lows, wide = torchs(*given, dtype=torch.float64)
        return total, *[wide for _ in lows], wide

    found, plain = run(ours, given, grads, grad_sum), run(torchs, given, grads, grad_sum)
    double = run(exact, [None if t is None else t.double() for t in given], grads, grad_sum)
    assert torch.equal(found[0], plain[0]), "the sum is bit-exact"
    for a, b, e in zip(found[1:], plain[1:], double[1:], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert error(a, e) <= 1.05 * error(b, e) + 2e-6 + atol, (error(a, e), error(b, e))


@pytest.mark.parametrize("centered", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("width", [1, 3, 16, 37, 768, 1000, 4099])
def test_any_width(width, low, centered):
    rows = 3 if width > 1000 else 7
    x, branch = drawn(rows, width), drawn(rows, width, dtype=low, seed=1)
    check(
        (x, branch, drawn(width, seed=2), drawn(width, seed=3) if centered else None),
        low,
        centered=centered,
        atol=1e-4 if width == 1 else 0,
    )


DTYPES = {
    "a low branch": (FP32, BF16, FP32),
    "a low x": (BF16, FP32, FP32),
    "all low": (BF16, BF16, BF16),
    "low, fp32 weights": (BF16, BF16, FP32),
    "no branch": (FP32, None, FP32),
    "no branch, low": (BF16, None, FP32),
    "no weights": (FP32, BF16, None),
}


@pytest.mark.parametrize("centered", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("name", DTYPES)
def test_any_dtypes(name, centered):
    x, branch, weight = DTYPES[name]
    given = (
        drawn(2, 5, 50, dtype=x),
        None if branch is None else drawn(2, 5, 50, dtype=branch, seed=1),
        None if weight is None else drawn(50, dtype=weight, seed=2),
        None if weight is None else drawn(50, dtype=weight, seed=3),
    )
    check(given, BF16, centered=centered)


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
def test_any_number_of_readers(readers):
    check((drawn(6, 33), drawn(6, 33, dtype=BF16, seed=1), drawn(33, seed=2), drawn(33, seed=3)), BF16, readers)


def test_gradients_that_are_given_stay_as_they_are():
    grads = [drawn(4, 33, seed=i) for i in range(6)]
    before = [g.clone() for g in grads]
    found = kernels._few(grads)
    assert len(found) == kernels.GRADS
    assert all(map(torch.equal, grads, before))
    torch.testing.assert_close(sum(found), sum(grads))


def test_values_far_from_zero():
    """The variance is of what is left when the mean is subtracted, not a difference of squares."""
    check((1000 + drawn(5, 300), drawn(5, 300, dtype=BF16, seed=1), drawn(300, seed=2), drawn(300, seed=3)), BF16)


def test_what_is_not_contiguous():
    x, branch = drawn(50, 6).t(), drawn(6, 100, dtype=BF16, seed=1)[:, ::2]
    check((x, branch, drawn(100, seed=2)[::2], drawn(50, seed=3)), BF16)
    stats, total, _ = kernels.forward(x, branch, None, None, 50, EPS, BF16, True, False, True)
    spread = torch.ones(1, 1, device=DEVICE, dtype=BF16).expand(6, 50)  # of a sum: all elements are one
    (dx,) = kernels.backward([spread], None, total, stats, None, 50, BF16, True, False, False, False, True)
    assert dx.abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing(shape):
    x, weight = drawn(*shape), drawn(shape[-1])
    made = kernels.forward(x, x.to(BF16), weight, weight, shape[-1], EPS, BF16, True, True, True)
    assert [t.shape for t in made[1:]] == [torch.Size(shape)] * 3
    grads = kernels.backward([made[2]], None, made[1], made[0], weight, shape[-1], BF16, True, True, True, True, True)
    assert [t.shape for t in grads] == [torch.Size(shape)] * 2 + [weight.shape] * 2
    assert not any(g.any() for g in grads[2:])


def test_a_nan_stays_in_its_row():
    x = drawn(6, 40)
    x[2, 3], x[4, 5] = torch.nan, torch.inf
    given = (x, drawn(6, 40, dtype=BF16, seed=1), None, None, 40, EPS, BF16, True, True, True)
    for made, expected in zip(kernels.forward(*given)[1:], norm_by_torch(*given)[1:], strict=True):
        assert torch.equal(made.isnan(), expected.isnan())


def test_it_computes_the_same_bits_again():
    given = (drawn(40, 64), drawn(40, 64, dtype=BF16, seed=1), drawn(64), drawn(64), 64, EPS, BF16, True, True, True)
    results = []
    for _ in range(2):
        stats, total, low, wide = made = kernels.forward(*given)
        grads = kernels.backward([low, wide], total, total, stats, given[2], 64, BF16, *[True] * 4, True)
        results.append([*made, *grads])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
def test_control_a_wrong_kernel_is_seen(kernel, monkeypatch):
    launch = triton_loader.launch

    def broken(module, name, programs, given, **options):
        launch(module, name, programs, given, **options | ({"CENTERED": False} if name == kernel else {}))

    monkeypatch.setattr(kernels, "launch", broken)
    with pytest.raises(AssertionError):
        test_any_dtypes("a low branch", True)
    monkeypatch.setattr(triton_loader, "_checked", set())
    with pytest.raises(kernels.CompilerError, match="not torch's on this device"):
        kernels.kernels(BF16)
    triton_loader._failed.clear()


def test_what_does_not_compile_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(kernels, "SOURCE", "amp_graph.passes.backends.cuda.kernels.no_such_source")
    monkeypatch.setattr(triton_loader, "require", lambda *_: None)
    monkeypatch.setitem(kernel_table._loaders, f"add_norm on {DEVICE}", lambda low: kernels.KERNELS)
    check((drawn(6, 33), drawn(6, 33, dtype=BF16, seed=1), drawn(33, seed=2), drawn(33, seed=3)), BF16)
    assert triton_loader.why_failed()
    triton_loader._failed.clear()

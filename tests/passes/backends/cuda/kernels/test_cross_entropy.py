"""The cross entropy of low-precision logits by Triton: torch's loss and gradients, to the last rounding."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from amp_graph.passes.backends.cuda.kernels import cross_entropy as kernels
from amp_graph.passes.native import kernel_table, triton_loader
from tests.passes.backends.cuda.kernels.where import DEVICE, gave_up, mark_where_they_run, round_as_gpus_do

pytestmark = [mark_where_they_run(), pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]  # numpy's
BF16, FP16 = torch.bfloat16, torch.float16
ROWS, CLASSES = 9, 50


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    """Call the kernels on the device of the tests, in parts of rows; what falls back to torch fails."""
    monkeypatch.setitem(kernel_table._loaders, f"cross_entropy on {DEVICE}", kernels.kernels)
    monkeypatch.setattr(kernels, "BLOCK", 32)
    monkeypatch.setattr(triton_loader, "_failed", {})
    round_as_gpus_do(monkeypatch)
    yield
    assert not gave_up()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LOGITS = (3 * drawn(ROWS, CLASSES)).bfloat16()
TARGET = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
TARGET[::4] = -100
WEIGHT = drawn(CLASSES, seed=2).abs()
FORMS = list(itertools.product(("none", "mean", "sum"), (0.0, 0.1), (None, WEIGHT), (-100, 3)))
NAMES = [f"{r}-{s}-{'plain' if w is None else 'weighted'}-{i}" for r, s, w, i in FORMS]
PLAIN = ("none", 0.0, None, -100)


def torchs(logits, target, weight, reduction, smoothing, ignore):
    weight = weight if weight is None else weight.to(logits.dtype)
    options = {"ignore_index": ignore, "reduction": reduction, "label_smoothing": smoothing}
    return F.cross_entropy(logits, target, weight, **options)


def ours(logits, target, weight, reduction, smoothing, ignore):
    return cross_entropy_low(logits, target, weight, ignore, reduction, smoothing)


def both(form, logits=LOGITS, target=TARGET):
    """Loss and gradient of the logits: ours, torch's on ``logits.float()``, and those of fp64."""
    reduction, smoothing, weight, ignore = form
    logits, target = logits.to(DEVICE), target.masked_fill(target == -100, ignore).to(DEVICE)
    weight = None if weight is None else weight.to(DEVICE)
    results = []
    for function, wide in ((ours, lambda x: x), (torchs, torch.Tensor.float), (torchs, torch.Tensor.double)):
        x = (logits.double() if function is torchs and results[1:] else logits.detach()).requires_grad_()
        loss = function(wide(x), target, weight, reduction, smoothing, ignore)
        (grad,) = torch.autograd.grad(loss, x, drawn(*loss.shape, seed=3).to(loss))
        results.append((loss.detach(), grad))
    return results


def error(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def check(form, logits=LOGITS, target=TARGET):
    (loss, grad), (expected, expected_grad), (exact, exact_grad) = both(form, logits, target)
    assert (loss.dtype, loss.shape) == (expected.dtype, expected.shape)
    assert (grad.dtype, grad.shape) == (expected_grad.dtype, expected_grad.shape)
    assert error(loss, exact) < 1e-6
    # One rounding to low precision of nearly the same fp32 numbers: a few fall to the other side.
    assert error(grad, expected_grad) < 1e-4
    assert error(grad, exact_grad) <= 1.01 * error(expected_grad, exact_grad)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_loss_and_gradients_are_torchs(form):
    check(form)


@pytest.mark.parametrize("form", [PLAIN, ("none", 0.1, None, -100), ("none", 0.1, WEIGHT, -100)], ids=str)
def test_parts_of_a_row_are_the_row(form, monkeypatch):
    results = []
    for block in (16, 32, 64):
        monkeypatch.setattr(kernels, "BLOCK", block)
        results.append(both(form)[0])
    for loss, grad in results[1:]:
        assert error(loss, results[0][0]) < 1e-6
        assert error(grad, results[0][1]) < 1e-4


@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("classes", [2, 15, 16, 33, 4096, 4099])
def test_any_number_of_classes(classes, low, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 1024 if classes > 64 else 32)
    check(PLAIN, (4 * drawn(5, classes, seed=4)).to(low), torch.tensor([0, classes - 1, -100, classes // 2, 0]))


def test_one_class():
    (loss, grad), _, _ = both(PLAIN, drawn(3, 1).bfloat16(), torch.tensor([0, -100, 0]))
    assert not loss.any()
    assert not grad.any()


@pytest.mark.parametrize("shift", [3e4, -3e4])
def test_large_logits_lose_nothing(shift):
    """The logarithm of the sum is kept apart from the maximum, beside which fp32 would round it."""
    check(("none", 0.1, None, -100), (shift + 64 * drawn(ROWS, CLASSES)).half())
    check(("none", 0.1, WEIGHT, -100), (shift + 256 * drawn(ROWS, CLASSES)).bfloat16())


def test_rows_that_are_apart_and_classes_that_are():
    wide = drawn(ROWS, 2 * CLASSES + 3, seed=5).bfloat16()
    check(PLAIN, wide[:, 1 : CLASSES + 1])
    check(PLAIN, wide[:, 1 : 2 * CLASSES + 1 : 2])
    check(PLAIN, wide[:CLASSES, :CLASSES].t()[: ROWS - 2, : ROWS - 1], TARGET[: ROWS - 2].clamp(max=ROWS - 2))
    cut = drawn(3, 4, CLASSES, seed=6).bfloat16()[:, :-1]
    (loss, grad), (expected, _), _ = both(PLAIN, cut.reshape(-1, CLASSES))
    assert error(loss, expected) < 1e-6
    x = cut.to(DEVICE).requires_grad_()
    loss = cross_entropy_low(x, TARGET.to(DEVICE), None, -100, "none")
    (whole,) = torch.autograd.grad(loss, x, drawn(ROWS, seed=3).to(DEVICE))
    assert torch.equal(whole.view(-1, CLASSES), grad)
    gradient = drawn(ROWS, 2, seed=3).to(DEVICE)[:, 0]  # its elements are apart
    (apart,) = torch.autograd.grad(cross_entropy_low(x, TARGET.to(DEVICE), None, -100, "none"), x, gradient)
    (dense,) = torch.autograd.grad(cross_entropy_low(x, TARGET.to(DEVICE), None, -100, "none"), x, gradient.clone())
    assert torch.equal(apart, dense)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0)])
def test_no_rows(shape):
    x = torch.empty(shape, dtype=BF16, device=DEVICE, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for reduction in ("none", "sum", "mean"):
        loss = cross_entropy_low(x, target, None, -100, reduction)
        assert torch.equal(loss, F.cross_entropy(x.float(), target, reduction=reduction)) or loss.isnan()
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert grad.shape == shape


def test_a_nan_is_not_lost_and_stays_in_its_row():
    logits = LOGITS.clone()
    logits[1, 3], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    (loss, grad), (expected, expected_grad), _ = both(PLAIN, logits)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(grad.isnan(), expected_grad.isnan())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_words_that_are_masked_out(smoothing):
    logits = LOGITS.clone()
    logits[1, :32] = -torch.inf  # a whole part of the row, and one in its middle
    logits[2, 4:20] = -torch.inf
    logits[3, TARGET[3]] = -torch.inf
    logits[5, 7] = 3e38
    (loss, grad), (expected, expected_grad), _ = both(("none", smoothing, None, -100), logits)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=8e-3, atol=1e-30)


def test_where_no_target_counts():
    (loss, grad), (expected, expected_grad), _ = both(("mean", 0.0, None, -100), target=torch.full((ROWS,), -100))
    assert loss.isnan()
    assert expected.isnan()
    assert torch.equal(grad, expected_grad)
    assert not grad.any()


@pytest.mark.skipif(DEVICE != "cpu", reason="the device's error ends the process's use of it")
@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_an_error(wrong):
    with pytest.raises(RuntimeError, match="index of target is out of bounds"):
        cross_entropy_low(LOGITS, torch.full((ROWS,), wrong))


def test_gradients_of_the_wide_logits_are_added_before_the_one_rounding():
    x, y = (LOGITS.to(DEVICE).detach().requires_grad_() for _ in range(2))
    target = TARGET.to(DEVICE)
    loss, wide = cross_entropy_and_logits(x, target)
    (loss + wide.sin().sum()).backward()
    expected = (wide2 := y.float()).sin().sum() + F.cross_entropy(wide2, target)
    expected.backward()
    assert torch.equal(wide, wide2)
    assert error(x.grad, y.grad) < 1e-4


def test_second_derivatives_are_torchs():
    def penalty(function, x):
        (first,) = torch.autograd.grad(function(x).sin(), x, create_graph=True)
        return torch.autograd.grad(first.double().square().sum(), x)[0]

    target = TARGET.to(DEVICE)
    got = penalty(lambda x: cross_entropy_low(x, target), LOGITS.to(DEVICE).detach().requires_grad_())
    exact = penalty(lambda x: F.cross_entropy(x, target), LOGITS.to(DEVICE).double().requires_grad_())
    assert error(got, exact) < 0.02


def test_the_logits_are_saved_and_two_numbers_a_row():
    x, kept = LOGITS.to(DEVICE).detach().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        cross_entropy_low(x, TARGET.to(DEVICE), None, -100, "none")
    wide = [t for t in kept if t.dtype == torch.float32]
    assert sum(t.numel() for t in wide) == 2 * ROWS
    assert sum(t.numel() for t in kept if t.is_floating_point()) == ROWS * CLASSES + 2 * ROWS


def test_the_gradient_over_the_logits_has_the_same_bits():
    x, target, grad = LOGITS.to(DEVICE).clone(), TARGET.to(DEVICE), drawn(ROWS).to(DEVICE)
    for given in (x, x.t().contiguous().t()):
        _, stats = kernels.KERNELS.forward(given, target, None, -100, 0.1)
        again = (stats, target, None, None, -100, 0.1)
        expected = kernels.KERNELS.backward(grad, given, *again)
        over = given.clone(memory_format=torch.preserve_format)
        assert kernels.cross_entropy_backward_of_stats_(grad, over, *again) is over
        assert torch.equal(over, expected)


def test_operators_and_what_fake_tensors_tell():
    x, target = LOGITS.to(DEVICE), TARGET.to(DEVICE)
    _, stats = kernels.KERNELS.forward(x, target, None, -100, 0.0)
    grad = torch.ones(ROWS, device=DEVICE)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.KERNELS.forward.default, (x, target, None, -100, 0.0), test_utils=checks)
    torch.library.opcheck(
        kernels.KERNELS.backward.default, (grad, x, stats, target, None, None, -100, 0.0), test_utils=checks
    )


# -- broken controls, and standing aside ---------------------------------------------------------------------------


def broken(monkeypatch, change):
    launch = triton_loader.launch
    monkeypatch.setattr(
        kernels, "launch", lambda m, k, p, given, **options: launch(m, k, p, change(k, given), **options)
    )


def rounded(kernel, given):
    """Statistics rounded to bf16."""
    return given if kernel == "rows_kernel" else (*given[:5], given[5].bfloat16().float(), *given[6:])


def one_class_less(kernel, given):
    return tuple(CLASSES - 1 if isinstance(n, int) and n == CLASSES else n for n in given)


@pytest.mark.parametrize("change", [rounded, one_class_less])
def test_control_a_wrong_kernel_is_seen(change, monkeypatch):
    broken(monkeypatch, change)
    with pytest.raises(AssertionError):
        check(PLAIN)


def test_control_a_wrong_kernel_is_seen_before_it_is_used(monkeypatch):
    monkeypatch.setattr(triton_loader, "_checked", set())
    broken(monkeypatch, lambda kernel, given: (*given[:5], given[5] * 0.9, *given[6:]) if len(given) > 14 else given)
    for _ in range(2):
        with pytest.raises(kernels.CompilerError, match="not torch's on this device"):
            kernels.kernels(BF16)
    loss = cross_entropy_low(LOGITS.to(DEVICE), TARGET.to(DEVICE))
    assert error(loss, F.cross_entropy(LOGITS.float(), TARGET)) < 1e-6
    triton_loader._failed.clear()


def test_a_check_that_raises_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_loader, "_checked", set())
    monkeypatch.setattr(kernels, "why_wrong", lambda device: {}[device.type])
    with pytest.raises(kernels.CompilerError, match="no Triton kernel: KeyError"):
        kernels.kernels(BF16)
    triton_loader._failed.clear()


def test_what_does_not_compile_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(kernels, "SOURCE", "amp_graph.passes.backends.cuda.kernels.no_such_source")
    x = LOGITS.to(DEVICE).detach().requires_grad_()
    loss, stats = kernels.cross_entropy_and_stats(x.detach(), TARGET.to(DEVICE), None, -100, 0.0)
    assert not stats.numel()
    grad = kernels.cross_entropy_backward_of_stats(
        torch.ones_like(loss), x.detach(), stats, TARGET.to(DEVICE), None, None, -100, 0.0
    )
    expected = F.cross_entropy(x.float(), TARGET.to(DEVICE), reduction="none")
    assert error(loss, expected.detach()) < 1e-6
    assert error(grad, torch.autograd.grad(expected.sum(), x)[0]) < 1e-4
    assert "ModuleNotFoundError" in next(iter(triton_loader.why_failed().values()))
    triton_loader._failed.clear()

"""The loss from low-precision logits: torch's loss and gradients, to the last rounding."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.loss import cross_entropy_functions
from amp_graph.passes.backends.cpu.loss import cross_entropy_functions as runtime
from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from tests.passes.drawn import drawn
from tests.relative_error import error

ROWS, CLASSES = 37, 50


@pytest.fixture(autouse=True, params=[pytest.param("compiled C", marks=pytest.mark.compiled), "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cross_entropy_functions, "library", lambda low: None)
    return request.param


LOGITS = (3 * drawn(ROWS, CLASSES)).bfloat16()
TARGET = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
TARGET[::5] = -100
FORMS = list(itertools.product(("none", "mean", "sum"), (-100, 3)))


def torchs(logits, target, reduction, ignore):
    return F.cross_entropy(logits, target, ignore_index=ignore, reduction=reduction)


def ours(logits, target, reduction, ignore):
    return cross_entropy_low(logits, target, ignore, reduction)


def both(form, logits=LOGITS, target=TARGET):
    """Loss and gradient of the logits: ours, torch's on ``logits.float()``, and those of fp64."""
    reduction, ignore = form
    target = target.masked_fill(target == -100, ignore)
    results = []
    for function, wide in ((ours, lambda x: x), (torchs, torch.Tensor.float), (torchs, torch.Tensor.double)):
        x = (logits.double() if function is torchs and results[1:] else logits.clone()).requires_grad_()
        loss = function(wide(x), target, reduction, ignore)
        (grad,) = torch.autograd.grad(loss, x, drawn(*loss.shape, seed=3).to(loss.dtype))
        results.append((loss.detach(), grad))
    return results


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_loss_and_gradients_are_torchs(form):
    (loss, grad), (expected, expected_grad), (exact, exact_grad) = both(form)
    assert (loss.dtype, loss.shape) == (expected.dtype, expected.shape)
    assert (grad.dtype, grad.shape) == (expected_grad.dtype, expected_grad.shape)
    assert error(loss, exact) < 1e-6
    # One rounding to bf16 of nearly the same fp32 numbers: a few fall to the other side.
    assert error(grad, expected_grad) < 1e-4
    assert error(grad, exact_grad) <= 1.01 * error(expected_grad, exact_grad)


def test_control_a_gradient_rounded_twice_is_seen(monkeypatch):
    monkeypatch.setattr(cross_entropy_functions, "library", lambda low: None)
    kernel = torch.softmax
    monkeypatch.setattr(runtime.torch, "softmax", lambda x, dim: kernel(x, dim).bfloat16().float())
    (_, grad), (_, expected), (_, exact) = both(("sum", -100))
    assert error(grad, exact) > 1.01 * error(expected, exact)
    assert error(grad, expected) > 1e-4


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 15, 16, 33, 4099, 9000])
def test_any_number_of_classes(classes, low, kernel):
    """Around the width of vectors, and of what is summed in fp32."""
    logits = (4 * drawn(5, classes, seed=4)).to(low)
    target = torch.tensor([0, classes - 1, -100, classes // 2, 0])
    (loss, grad), (_, expected_grad), (exact, exact_grad) = both(("none", -100), logits, target)
    assert (error(loss, exact) if classes > 1 else loss.abs().max()) < 1e-6
    assert error(grad, exact_grad) <= 1.01 * error(expected_grad, exact_grad) if classes > 1 else not grad.any()
    assert (runtime.losses_of_rows(logits, target, -100) is not None) is (kernel == "compiled C")


def test_control_a_wrong_logit_is_seen_by_the_kernel():
    logits = LOGITS.clone()
    logits[4, 9] += 2
    seen = error(cross_entropy_low(logits, TARGET), cross_entropy_low(LOGITS, TARGET))
    assert seen > 1e-5, "ten times what the tests above allow"


def test_a_nan_is_not_lost_and_stays_in_its_row():
    logits = LOGITS.clone()
    logits[1, 3] = float("nan")
    logits[2, 4] = torch.inf
    (loss, grad), (expected, expected_grad), _ = both(("none", -100), logits)
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(grad.isnan(), expected_grad.isnan())


def test_several_threads_compute_the_same_bits():
    logits, target = drawn(300, 5000).bfloat16(), torch.arange(300)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        x = logits.clone().requires_grad_()
        loss = cross_entropy_low(x, target, -100, "none")
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
    assert all(map(torch.equal, *results))


def test_extreme_logits():
    logits = LOGITS.clone()
    logits[0, 4:20] = -torch.inf  # words that are masked out; a target among them in row 1
    logits[1, TARGET[1]] = -torch.inf
    logits[2, 7] = 3e38
    (loss, grad), (expected, expected_grad), _ = both(("none", -100), logits)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=8e-3, atol=1e-30)


def test_where_no_target_counts():
    (loss, grad), (expected, expected_grad), _ = both(("mean", -100), target=torch.full((ROWS,), -100))
    assert loss.isnan()
    assert expected.isnan()
    assert torch.equal(grad, expected_grad)
    assert not grad.any()


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_an_error(wrong):
    with pytest.raises((IndexError, RuntimeError), match=r"index|out of bounds"):
        cross_entropy_low(LOGITS, torch.full((ROWS,), wrong))


def test_gradients_of_the_wide_logits_are_added_before_the_one_rounding():
    x, y = (LOGITS.clone().requires_grad_() for _ in range(2))
    loss, wide = cross_entropy_and_logits(x, TARGET)
    (loss + wide.sin().sum()).backward()
    ((wide2 := y.float()).sin().sum() + F.cross_entropy(wide2, TARGET)).backward()
    assert torch.equal(wide, wide2)
    assert error(x.grad, y.grad) < 1e-4
    (alone,) = torch.autograd.grad(cross_entropy_and_logits(x, TARGET)[1].sum(), x)
    assert torch.equal(alone, torch.ones_like(alone))

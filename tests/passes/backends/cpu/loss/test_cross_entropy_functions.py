"""The loss from low-precision logits: torch's loss and gradients, to the last rounding."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.backends.cpu.loss import cross_entropy_functions as runtime
from amp_graph.passes.backends.cpu.loss.cross_entropy_functions import cross_entropy_and_logits, cross_entropy_low
from tests.passes.drawn import differentiated, drawn
from tests.relative_error import error

ROWS, CLASSES = 37, 50


@pytest.fixture(autouse=True, params=[pytest.param("compiled C", marks=pytest.mark.compiled), "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(runtime, "library", lambda low: None)
    return request.param


LOGITS = (3 * drawn(ROWS, CLASSES)).bfloat16()
TARGET = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
TARGET[::5] = -100


def both(logits=LOGITS, target=TARGET, reduction="none", ignore=-100):
    """Loss and gradient of the logits: ours, torch's on ``logits.float()``, and those of fp64."""
    target = target.masked_fill(target == -100, ignore)
    torchs = partial(F.cross_entropy, target=target, ignore_index=ignore, reduction=reduction)
    ours = differentiated(lambda x: cross_entropy_low(x, target, ignore, reduction), [logits], like=torch.float32)
    theirs = differentiated(lambda x: torchs(x.float()), [logits])
    return ours, theirs, differentiated(torchs, [logits], torch.float64, like=torch.float32)


FORMS = [{"reduction": form, "ignore": ignore} for form in ("none", "mean", "sum") for ignore in (-100, 3)]
# Around the width of vectors, and of what is summed in fp32.
FORMS += [
    {"logits": (4 * drawn(5, n, seed=4)).to(low), "target": torch.tensor([0, n - 1, -100, n // 2, 0])}
    for n in (1, 15, 16, 33, 4099, 9000)
    for low in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_torchs(form, kernel):
    ours, theirs, exact = both(**form)
    assert [(t.dtype, t.shape) for t in ours] == [(t.dtype, t.shape) for t in theirs]
    if form.get("logits", LOGITS).shape[1] == 1:
        assert not any(t.any() for t in ours)
        return
    assert error(ours[0], exact[0]) < 1e-6
    # One rounding to low precision of nearly the same fp32 numbers: a few fall to the other side.
    assert error(ours[1], theirs[1]) < 1e-4
    assert error(ours[1], exact[1]) <= 1.01 * error(theirs[1], exact[1])
    assert (runtime.losses_of_rows(LOGITS, TARGET, -100) is not None) is (kernel == "compiled C")


def test_control_a_gradient_rounded_twice_is_seen(monkeypatch):
    monkeypatch.setattr(runtime, "library", lambda low: None)
    kernel = torch.softmax
    monkeypatch.setattr(runtime.torch, "softmax", lambda x, dim: kernel(x, dim).bfloat16().float())
    (_, grad), (_, expected), (_, exact) = both(reduction="sum")
    assert error(grad, exact) > 1.01 * error(expected, exact)
    assert error(grad, expected) > 1e-4


def test_control_a_wrong_logit_is_seen_by_the_kernel():
    logits = LOGITS.clone()
    logits[4, 9] += 2
    seen = error(cross_entropy_low(logits, TARGET), cross_entropy_low(LOGITS, TARGET))
    assert seen > 1e-5, "ten times what the tests above allow"


EXTREME = LOGITS.clone()
EXTREME[0, 4:20] = -torch.inf  # words that are masked out; a target among them in row 1
EXTREME[1, TARGET[1]] = -torch.inf
EXTREME[2, 7] = 3e38
NO_NUMBERS = LOGITS.clone()
NO_NUMBERS[1, 3], NO_NUMBERS[2, 4] = torch.nan, torch.inf
ODD = {
    "extreme": {"logits": EXTREME},
    "a NaN stays in its row": {"logits": NO_NUMBERS},
    "no target counts": {"target": torch.full((ROWS,), -100), "reduction": "mean"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_logits_and_targets_are_as_torchs(name):
    ours, theirs, _ = both(**ODD[name])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(ours[1], theirs[1], rtol=8e-3, atol=1e-30, equal_nan=True)


def test_several_threads_compute_the_same_bits():
    given = {"logits": drawn(300, 5000).bfloat16(), "target": torch.arange(300)}
    alone = both(**given)[0]
    torch.set_num_threads(3)
    assert all(map(torch.equal, both(**given)[0], alone))


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

"""The gradient of logits over the logits: the same bits, only in memory that nobody reads any more."""

import pytest
import torch

from amp_graph.passes.backends.cpu.loss import cross_entropy_functions
from amp_graph.passes.backends.cpu.loss.logits_gradient_in_place import LogitsGradientInPlace
from amp_graph.passes.base import PassResult
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.manager import run_passes
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat.fake import make_fx
from tests.passes.backends.cpu.loss.test_fuse_cross_entropy import IDS, Words, _a_machine_where_it_is_profitable  # noqa: F401
from tests.passes.drawn import drawn
from tests.passes.whole_steps import stepped

ROWS, CLASSES, IGNORED = 130, 1003, -100
TARGET = torch.arange(ROWS).mul(37) % CLASSES
TARGET[::7] = IGNORED
GRAD = torch.linspace(-1, 1, ROWS)


@pytest.fixture(params=["compiled C", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(cross_entropy_functions, "library", lambda low: None)
    elif cross_entropy_functions.library(torch.bfloat16) is None:
        pytest.skip("no compiler")
    return request.param


@pytest.mark.parametrize("wide", [None, 4 * drawn(ROWS, CLASSES, seed=2)], ids=["alone", "with another's"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_same_bits_over_the_logits(low, wide, kernel):
    logits = (4 * drawn(ROWS, CLASSES, seed=3)).to(low)
    logits[5, 6], logits[8, TARGET[8]] = torch.nan, torch.inf
    rest = (TARGET, wide, IGNORED)
    expected = OPS.cross_entropy_backward(GRAD, logits.clone(), *rest)
    found = OPS.cross_entropy_backward_(GRAD, logits, *rest)
    assert found.data_ptr() == logits.data_ptr()
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), "NaNs included"


def test_logits_that_lie_otherwise(kernel):
    across = (4 * drawn(CLASSES, ROWS, seed=3)).bfloat16().t()
    expected = OPS.cross_entropy_backward(GRAD, across.clone(), TARGET, None, IGNORED)
    assert torch.equal(OPS.cross_entropy_backward_(GRAD, across, TARGET, None, IGNORED), expected)
    assert torch.equal(across, expected)


def gradient(logits, target, grad):
    return OPS.cross_entropy_backward(grad, logits, target, None, IGNORED)


GIVEN = (4 * drawn(ROWS, 8)).bfloat16(), (4 * drawn(CLASSES, 8, seed=4)).bfloat16(), TARGET, GRAD
GOES = {
    "a product": lambda x, w, *y: gradient(x @ w.t(), *y).t() @ x,
    "read before": lambda x, w, *y: ((made := x @ w.t()).sum(), gradient(made, *y)),
    "seen otherwise": lambda x, w, *y: gradient((x @ w.t()).view(10, 13, CLASSES).view(ROWS, CLASSES), *y),
}
STAYS = {
    "returned": lambda x, w, *y: ((made := x @ w.t()), gradient(made, *y)),
    "a view returned": lambda x, w, *y: ((made := x @ w.t())[:3], gradient(made, *y)),
    "read behind": lambda x, w, *y: (gradient(made := x @ w.t(), *y), made.sum()),
    "two gradients, first": lambda x, w, *y: ((first := gradient(made := x @ w.t(), *y)), first + made),
    "across": lambda x, w, *y: gradient((w @ x.t()).t(), *y),
    "beside itself": lambda x, w, *y: gradient(made := x @ w.t(), y[0], made[:, 0]),
}


def passed(function):
    plain, ours = (make_fx(function, tracing_mode="fake")(*GIVEN) for _ in range(2))
    (done,) = run_passes(ours, [LogitsGradientInPlace()], checked=True)
    return plain, ours, done.result


def equal(plain, ours):
    found = [out if isinstance(out, tuple) else (out,) for out in (plain(*GIVEN), ours(*GIVEN))]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", GOES)
def test_what_goes(name):
    plain, ours, result = passed(GOES[name])
    assert [change.action for change in result.changes] == ["over the logits"]
    assert equal(plain, ours)
    assert not run_passes(ours, [LogitsGradientInPlace()], checked=True)[0].result.changes


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name):
    plain, ours, result = passed(STAYS[name])
    assert not result.changes
    assert len(result.skips) == 1
    assert equal(plain, ours)


def test_logits_of_the_caller_stay():
    ours = make_fx(gradient, tracing_mode="fake")((4 * drawn(ROWS, CLASSES)).bfloat16(), TARGET, GRAD)
    (done,) = run_passes(ours, [LogitsGradientInPlace()], checked=True)
    assert not done.result.changes


@pytest.mark.parametrize("name", ["returned", "a view returned", "read behind", "two gradients, first"])
def test_control_logits_that_are_read_again_are_seen(name, monkeypatch):
    monkeypatch.setattr(Lifetimes, "is_done_after", lambda *_: True)
    plain, ours, result = passed(STAYS[name])
    assert result.changes
    assert not equal(plain, ours)


def test_a_step_has_it_and_trains_the_same_bits(monkeypatch):
    how = (Words, lambda out: out[0], [(IDS.clamp(min=0),)] * 4)
    losses, _, text = stepped(*how)
    assert "cross_entropy_backward_" in text
    monkeypatch.setattr(LogitsGradientInPlace, "run", lambda self, gm: PassResult(gm))
    expected, _, text = stepped(*how)
    assert "cross_entropy_backward_" not in text
    assert torch.equal(losses, expected)

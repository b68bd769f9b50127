"""The measured errors of operations are those of ``compare``, also of samples, and a look changes no value."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_graph
from amp_graph.audit.session import Audit
from amp_graph.audit.unsafe_operations import UnsafeOperations
from tests.layers import layers

INDEX = torch.arange(1200) % 7
OPERATIONS = {
    "exp": lambda x: x.exp(),
    "log1p": lambda x: x.abs().log1p(),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x[:, :30].prod(-1),
    "var": lambda x: x.var(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cos": lambda x: x.cos(),
    "index_add": lambda x: x.new_zeros(7, x.shape[1]).index_add(0, INDEX[: len(x)], x),
    "rsqrt": lambda x: x.abs().clamp_min(2**-6).rsqrt(),
}


@layers(lambda operation, x: dict(operation=operation, x=nn.Parameter(x.bfloat16().float())))
def Called(self, one):
    """Calls an operation on a value that bfloat16 has."""
    return self.operation(self.x * one)


def measured(operation, x):
    """Return the errors that an audit measured of a call, by their codes, and what it found."""
    with Audit(looks=(1,)) as audit:
        operation(x)
    watcher = next(w for w in audit.watchers if isinstance(w, UnsafeOperations))
    errors = {code: next(iter(found.values())) for (code, _), found in watcher._errors.items()}
    return errors, audit.report().findings


def found(operation, x):
    """Return the levels of what an audit finds in a call, by codes."""
    return {f.code: f.level for f in measured(operation, x)[1]}


@pytest.mark.parametrize("shape", [(40, 30), (1200, 1000)], ids=["whole", "sampled"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_errors_are_within_a_tenth_of_those_of_compare(name, shape):
    torch.manual_seed(0)
    x, one = torch.randn(shape) + 0.5, torch.ones(())
    asked = amp_graph.Policy("bf16", allow=(f"aten.{name}",), skip_unprofitable="false")
    found = amp_graph.compare(Called(OPERATIONS[name], x), [(one,)], policy=asked).operations
    theirs = next(f for f in found if f.key.partition(":")[2].partition(".")[0] == name)
    assert theirs.precision == "low", theirs
    with torch.no_grad():
        (errors,) = measured(OPERATIONS[name], x.bfloat16())[0].values()
    assert errors.own.error > 1e-4
    assert errors.own.error == pytest.approx(theirs.error, rel=0.1)


def test_a_softmax_that_sums_in_float32_is_harmless():
    x = (10 * torch.randn(20, 300)).bfloat16()
    assert found(lambda x: torch.softmax(x, -1), x) == {}
    assert found(lambda x: x.sum(-1), x) == {}
    assert found(lambda x: torch.log_softmax(x, -1), x) == {"AMP401": "note"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_a_backward_or_of_a_scale_is_a_note_in_low_precision(dtype):
    def losses(x, scaler=None):
        x = x.clone().requires_grad_()
        loss = (x * x).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()

    low = torch.randn(20, 300).to(dtype)
    assert found(losses, low)["AMP401"] == "note"
    (one,) = (f for f in measured(losses, low)[1] if f.code == "AMP401")
    assert one.place.line == losses.__code__.co_firstlineno + 2, "where it is reduced"
    assert ({torch.bfloat16: "2 to 3 digits", torch.float16: "3 to 4 digits"})[dtype] in one.text
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert found(lambda x: losses(x, scaler), low)["AMP401"] == "note"
    assert "AMP401" not in found(losses, low.float())

    def crosses(x):
        torch.log_softmax(x.clone().requires_grad_(), -1).mean().backward()

    (one,) = (f for f in measured(crosses, low)[1] if f.code == "AMP401")
    assert one.evidence["operation"] == "_log_softmax", "once, where it is computed"


LOSSES = {
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "squares": F.mse_loss,
    "mean of abs": lambda y, t: (y - t).abs().mean(),
    "charbonnier": lambda y, t: ((y - t) ** 2 + 1e-3).sqrt().mean(),
    "norm": lambda y, t: torch.linalg.vector_norm(y - t),
    "sum of means": lambda y, t: (y - t).abs().mean(1).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_summed", [False, True])
def test_a_low_reduction_is_found_through_what_a_loss_is_added_up_from(name, is_summed):
    def train(x, widens=False):
        y, t = x.clone().requires_grad_(), x.flip(0)
        y, t = (y.float(), t.float()) if widens else (y, t)
        one = LOSSES[name](y, t)
        other = y.float().square().mean()
        terms = [one.float() * 0.5, other]
        loss = sum(terms) + 1 if is_summed else 45 * torch.stack(terms).mean()
        loss.backward()

    x = torch.randn(20, 30).bfloat16()
    lines = {f.place.line for f in measured(train, x)[1] if f.code == "AMP401"}
    assert lines & {train.__code__.co_firstlineno + 3, LOSSES[name].__code__.co_firstlineno}
    assert not [f for f in measured(lambda x: train(x, widens=True), x)[1] if f.code == "AMP401"]


def test_a_low_reduction_that_reaches_no_loss_is_none_of_a_loss():
    def train(x):
        y = x.clone().requires_grad_()
        print((y - 1).abs().mean().item())
        large = y.float() * y.abs().mean()  # a weight of values, which are not numbers of a loss
        (large.float().square().mean() + 0 * y.float().mean()).backward()

    assert not [f for f in measured(train, torch.randn(20, 30).bfloat16())[1] if f.code == "AMP401"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whole_numbers_count_from_where_a_dtype_cannot_hold_them(dtype):
    last = {torch.bfloat16: 256, torch.float16: 2048}[dtype]
    for count, codes in ((last + 1, {}), (last + 2, {"AMP404": "warning"})):
        exact = torch.arange(count)
        assert found(lambda x: x.to(dtype), exact) == codes
        assert found(lambda x: x.to(dtype), exact.float()) == codes
        assert found(lambda x: torch.zeros(len(x), dtype=dtype).copy_(x), exact) == codes
        assert found(lambda x, n=count: torch.arange(n, dtype=dtype), exact) == codes
        counted = found(lambda x: x.sum(), torch.ones(count - 1, dtype=dtype))
        assert counted.get("AMP404") == codes.get("AMP404")
    assert found(lambda x: x.to(dtype), 1000 * torch.randn(4000)) == {}
    assert found(lambda x: x.to(dtype), -9999.0 * torch.ones(9, 9).triu(1)) == {}  # a mask


@pytest.mark.parametrize(("largest", "codes"), [(0.5, {}), (200.0, {"AMP405": "warning"})])
def test_angles_are_unsafe_where_their_rounding_is_another_angle(largest, codes):
    assert found(torch.sin, torch.linspace(-largest, largest, 999).bfloat16()) == codes
    assert found(torch.sin, torch.arange(100).bfloat16()) == {}


def test_a_difference_of_nearly_equal_numbers_is_unsafe():
    x = torch.randn(500).bfloat16()
    assert found(lambda x: x - (x * 1.01), x) == {"AMP406": "warning"}
    assert found(lambda x: x - x.flip(0), x) == {}
    assert found(lambda x: x.float() - (x * 1.01), x) == {}


def test_in_place_operations_are_computed_before_they_write():
    x = (torch.rand(100, 8) + 0.5).bfloat16()
    index = torch.zeros(100, dtype=torch.long)
    errors, _ = measured(lambda x: torch.zeros(1, 8, dtype=x.dtype).index_add_(0, index, x), x)
    low, exact = torch.zeros(1, 8).bfloat16().index_add_(0, index, x), x.double().sum(0, keepdim=True)
    wanted = float((low.double() - exact).norm() / exact.norm())
    assert errors["AMP403"].own.error == pytest.approx(wanted, rel=1e-3)
    kept = x.clone()
    measured(lambda x: x.exp_().log_(), x)
    assert torch.equal(x, kept.exp().log())

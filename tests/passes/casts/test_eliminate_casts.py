"""EliminateCasts is bit-exact, gradients included; the same checks find variants that go further."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes.casts import eliminate_casts
from amp_graph.passes.casts.eliminate_casts import EliminateCasts
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.manager import run_passes
from tests.layers import layers
from tests.passes.graphs import BF16, Function, capture_function, differences, passes_before, run_step, with_and_without
from tests.passes.programs import captured
from tests.relative_error import errors

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))


class Wrong(EliminateCasts):
    """With a function of its module that always returns ``answer``."""

    function, answer = "", None

    def run(self, gm):
        with mock.patch.object(eliminate_casts, self.function, return_value=self.answer):
            return super().run(gm)


def wrong_by(function, answer):
    return type(f"Wrong_{function}", (Wrong,), {"function": function, "answer": answer})


REMOVES_ROUNDINGS = wrong_by("_widens", True)  # takes full -> low -> full for redundant
# Removes low -> full -> low where another reader's gradient is summed in full precision.
IGNORES_OTHER_READERS = wrong_by("captured", SimpleNamespace(requires_grad=False))
IGNORES_WRITES = wrong_by("observe", Memory({}, {}, {}))  # removes the copy of a storage that is written
HOLDS_ANYTHING = wrong_by("_holds", True)  # makes a constant in another dtype whatever it is filled with


def effect_of(graph, one, policy="bf16"):
    """Return (how many conversions ``one`` removed, what differs afterwards)."""
    plain, ours, given, result = with_and_without(one, graph, behind=passes_before(EliminateCasts, policy))
    return len(result.changes), differences(run_step(ours, given), run_step(plain, given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
@pytest.mark.parametrize("seed", range(24))
def test_outputs_gradients_and_inputs_are_bit_for_bit_the_same(seed, policy):
    _, wrong = effect_of(captured(seed), EliminateCasts(), policy)
    assert not wrong


def test_the_random_programs_have_something_to_remove():
    assert sum(effect_of(captured(seed), EliminateCasts())[0] > 0 for seed in range(24)) >= 6


def round_trip(self, x):
    return (x @ self.w).float().bfloat16() @ self.w.bfloat16()


def rounding(self, x):
    return torch.exp((x * 1.1).bfloat16().float() * self.w[0])


def two_readers(self, x):
    h = (x @ self.w).bfloat16()
    wide = h.float()
    return wide.bfloat16() * 3.3, torch.exp(wide) * 1.7


def written_copy(self, x):
    h = (x @ self.w).bfloat16()
    copy = h.float().bfloat16()
    copy.add_(1.0)
    return h * 2, copy


def written_source(self, x):
    h = (x @ self.w).bfloat16()
    copy = h.float().bfloat16()
    h.mul_(2.0)
    return h * 2, copy.relu()


def sums_into_zeros(self, x):
    h = x @ self.w
    return torch.zeros_like(h).index_add(0, self.rows, torch.exp(h)), h @ self.w


def fills(self, x):
    h = x @ self.w
    fill = h.new_full((4, 8), 0.1).bfloat16().float()  # not a number of bf16: stays rounded
    return torch.full_like(h, 0.5).bfloat16().float() + fill + torch.exp(h)


def makes_a_window(self, x):
    return x @ self.w * torch.signal.windows.hann(1).bfloat16()  # ones, by a function that takes fp32 and fp64 alone


def written_zeros(self, x):
    h = (x @ self.w).bfloat16()
    made = torch.zeros_like(h)
    wide = made.float()
    made.add_(1.0)
    other = torch.ones_like(h).float()
    other.mul_(torch.exp(h))
    return wide + 1, made, other


ROWS = torch.tensor([0, 0, 3, 1])


MODELS = (
    round_trip, rounding, two_readers, written_copy, written_source, sums_into_zeros, fills, makes_a_window,
    written_zeros,
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", MODELS)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16,accuracy=fast"])
def test_each_kind_of_round_trip_and_constant_is_kept_exact(function, policy):
    removed, wrong = effect_of(capture_function(function, X, w=W, rows=ROWS), EliminateCasts(), policy)
    assert not wrong
    assert removed or function not in (round_trip, two_readers, fills) or policy == "fp16"


@pytest.mark.parametrize(
    ("function", "variant"),
    [
        (rounding, REMOVES_ROUNDINGS),
        (two_readers, IGNORES_OTHER_READERS),
        (written_copy, IGNORES_WRITES),
        (written_source, IGNORES_WRITES),
        (fills, HOLDS_ANYTHING),
    ],
)
def test_negative_control_wrong_variants_are_found(function, variant):
    removed, wrong = effect_of(capture_function(function, X.clone().requires_grad_(), w=W), variant())
    assert removed >= 1, "the variant did nothing: the control controls nothing"
    assert wrong


def test_what_is_kept_has_a_reason():
    gm, _ = capture_function(rounding, X, w=W).through(passes_before(EliminateCasts))
    (done,) = run_passes(gm, [EliminateCasts()], checked=True)
    assert any("rounds: kept" in skip.reason for skip in done.result.skips)


def test_a_conversion_that_copies_or_moves_is_no_cast():
    def copies(self, x):
        h = (x @ self.w).bfloat16()
        twin = h.to(BF16, copy=True)
        return twin * 2, h

    gm, _ = capture_function(copies, X, w=W).through([*passes_before(EliminateCasts), EliminateCasts()])
    assert any(n.target == "to" and n.kwargs.get("copy") for n in gm.graph.nodes)


def casts_of_constants(gm):
    made = ("zeros", "full", "ones")
    return [n for n in gm.graph.nodes if n.args and any(m in str(getattr(n.args[0], "target", "")) for m in made)]


def test_no_cast_reads_a_constant_that_could_be_made_so_at_once():
    before = passes_before(EliminateCasts, "bf16,planner=paint")
    gm, _ = capture_function(sums_into_zeros, X, w=W, rows=ROWS).through(before)
    assert any(n.target == "float" for n in casts_of_constants(gm))
    run_passes(gm, [EliminateCasts()], checked=True)
    assert not any(n.target == "float" for n in casts_of_constants(gm))


def test_a_number_that_python_reads_is_not_widened():
    graph = capture_function(lambda self, x: x * (x @ self.w).amax().item(), X, w=W)
    gm, _ = graph.through(passes_before(EliminateCasts))
    before = run_step(gm, graph.given)
    (done,) = run_passes(gm, [EliminateCasts()], checked=True)
    assert any("number that is read" in change.reason for change in done.result.changes)
    assert not differences(run_step(gm, graph.given), before)


BESIDE = {
    "a value": lambda s, x: ((h := x.sum(0)).double().float().expand(4, -1), h),
    "an input": lambda s, x: (x.double().float(), x.sum(0)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_copy_that_the_caller_has_beside_its_source_stays_one(name):
    model, x = Function(BESIDE[name]), torch.randn(4, 8)
    with torch.no_grad():
        copied, source = amp_graph.convert(model, "bf16")(x)
        before = (source.clone(), x.clone())
        copied[0].zero_()
    assert torch.equal(source, before[0])
    assert torch.equal(x, before[1])


RETURNED = {
    "once": lambda s, x: (x @ s.w).relu().bfloat16(),
    "twice": lambda s, x: ((h := (x @ s.w).relu()).bfloat16(), h.bfloat16().view(-1)),
    "and read": lambda s, x: ((h := x @ s.w).bfloat16(), h @ s.w),
    "by way of fp32": lambda s, x: (x @ s.w).relu().float().bfloat16(),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_a_callers_write_to_a_copy_reaches_nothing_else(name, trained):
    model = Function(RETURNED[name], w=W)
    x = torch.randn(4, 8, requires_grad=trained)

    def run():
        outputs = model(x)
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        first.add_(1.0)
        loss = sum(t.float().sum() for t in (first, *others))
        return [first, *others, *(torch.autograd.grad(loss, x) if trained else ())]

    want = run()
    amp_graph.convert(model, "bf16")
    assert max(errors(run(), want)) < 0.02


@layers(lambda: dict(layer=nn.Linear(8, 8)))
def TakesLow(self, x):
    """Is given low precision, and computes in fp32, by the user's word."""
    return self.layer(x.float())


@pytest.mark.parametrize("trained", [False, True])
def test_a_backward_does_not_read_what_the_caller_may_write_until_then(trained):
    model = TakesLow()
    leaf = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=trained)

    def gradient():
        given = leaf * 1
        out = model(given)
        with torch.no_grad():
            given.zero_()
        return torch.autograd.grad(out.square().sum(), model.layer.weight)[0]

    want = gradient()
    amp_graph.convert(model, "bf16")
    for _ in range(2):
        assert (gradient() - want).norm() <= 0.02 * want.norm()

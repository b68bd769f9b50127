"""Loops with recorded calls: the same bits as without, or not recorded, with the reason in the report."""

import contextlib
import re

import pytest
import torch

import amp_graph
from amp_graph.replay import eligibility, replayed_call, slots
from tests.replay import loops, stand_in
from tests.replay.loops import DECLINED, LOOPS

# The others are left to `make test-long`: each takes a capture or two, twice.
BY_DEFAULT = {
    "dropout_and_batch_norm",
    "accumulation",
    "two_forwards_one_backward",
    "retain_graph",
    "outputs_held_for_many_steps",
}
CASES = [pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.slow) for name in LOOPS]


@pytest.fixture
def recorders(monkeypatch):
    return stand_in.install(monkeypatch).made


def run(name, word):
    torch.manual_seed(0)
    return LOOPS[name](word)


def differences(found, expected):
    assert len(found) == len(expected)
    pairs = zip(found, expected, strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a.nan_to_num(), b.nan_to_num())]


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_loop_has_the_bits_of_one_that_is_not(name, recorders, monkeypatch):
    models = []
    plain = loops.converted
    monkeypatch.setattr(loops, "converted", lambda *a, **k: models.append(plain(*a, **k)) or models[-1])
    found = run(name, "true")
    notes = "\n".join(note for model in models for note in amp_graph.report(model).notes if "replay" in note)
    replayed = sum(r.replayed for r in recorders)
    expected = run(name, "false")
    assert differences(found, expected) == []
    if name in DECLINED:
        assert re.search(f"is not recorded.*({DECLINED[name]})", notes), notes
    else:
        assert replayed >= 2, notes
        assert "is not recorded" not in notes


def test_a_graph_that_was_recorded_is_not_differentiated_again(recorders):
    model = loops.converted("true", loops.Judge())
    for i in range(5):
        x = torch.randn(8, 3, requires_grad=True)
        out = model(x).sum()
        if i < 4:
            out.backward()
    with pytest.raises(RuntimeError, match=r"create_graph=True(.|\n)*fix:   the policy word replay=false"):
        torch.autograd.grad(out, x, create_graph=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # from now on it runs as it is
    grad.square().sum().backward()


# -- broken controls: what each rule is for ------------------------------------------------------------


def _no_copies(monkeypatch):
    monkeypatch.setattr(slots, "copies", list)


def _no_inputs(monkeypatch):
    monkeypatch.setattr(slots, "fill", lambda twin, source: None)


def _any_address(monkeypatch):
    monkeypatch.setattr(slots, "addresses_of", lambda args, numbers: [])


def _one_slot_for_all(monkeypatch):
    monkeypatch.setattr(slots.Slot, "is_free", True)
    monkeypatch.setattr(replayed_call.ReplayedCall, "is_current", lambda self: True)


def _kept_graphs_replayed(monkeypatch):
    monkeypatch.setattr(replayed_call, "keeps_graph", lambda: False)


def _draws_are_recorded(monkeypatch):
    monkeypatch.setattr(eligibility, "draws", lambda *_: False)


def _writes_are_not_seen(monkeypatch):
    monkeypatch.setattr(eligibility, "written_arguments", lambda _: ())


def _nobody_notices(monkeypatch):
    of_one = slots.inputs_behind
    monkeypatch.setattr(slots, "inputs_behind", lambda outputs: set().union(*(of_one([one]) for one in outputs)))


BROKEN = {
    "outputs are not copied": ("outputs_held_for_many_steps", _no_copies),
    "inputs are not copied": ("simple", _no_inputs),
    "addresses are not compared": ("moved_parameters", _any_address),
    "one slot serves two forwards": ("two_forwards_one_backward", _one_slot_for_all),
    "a kept graph is replayed": ("retain_graph", _kept_graphs_replayed),
    "checkpoints draw anew": ("checkpoints_with_random_draws", _draws_are_recorded),
    "zeros go on where nothing arrives": ("a_head_behind_another_model", _nobody_notices),
    "an input's change stays in a copy": ("an_input_that_is_written", _writes_are_not_seen),
}
FEW = {"outputs are not copied", "one slot serves two forwards"}


@pytest.mark.parametrize("broken", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in BROKEN])
def test_control_a_broken_rule_shows(broken, recorders, monkeypatch):
    name, break_it = BROKEN[broken]
    expected = run(name, "false")
    break_it(monkeypatch)
    found = []
    # Of a backward whose values are gone, and of a hook of a gradient that is None.
    with contextlib.suppress(RuntimeError, TypeError, AttributeError):
        found = run(name, "true")
    assert not found or differences(found, expected)

"""Loops with recorded calls: the same bits as without, or not recorded, with the reason in the report."""

import contextlib
import re

import pytest
import torch

import amp_graph
from amp_graph.replay import eligibility, replayed_call, slots
from tests.replay import loops
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


def _of_each(outputs, of_one=slots.inputs_behind):
    return set().union(*(of_one([one]) for one in outputs))


# The loop that shows it, and what stands in the place of the rule.
BROKEN = {
    "outputs are not copied": ("outputs_held_for_many_steps", [(slots, "copies", list)]),
    "inputs are not copied": ("simple", [(slots, "fill", lambda twin, source: None)]),
    "addresses are not compared": ("moved_parameters", [(slots, "addresses_of", lambda args, numbers: [])]),
    "one slot serves two forwards": (
        "two_forwards_one_backward",
        [(slots.Slot, "is_free", True), (replayed_call.ReplayedCall, "is_current", lambda self: True)],
    ),
    "a kept graph is replayed": ("retain_graph", [(replayed_call, "keeps_graph", lambda: False)]),
    "checkpoints draw anew": ("checkpoints_with_random_draws", [(eligibility, "draws", lambda *_: False)]),
    "zeros go on where nothing arrives": ("a_head_behind_another_model", [(slots, "inputs_behind", _of_each)]),
    "an input's change stays in a copy": (
        "an_input_that_is_written", [(eligibility, "written_arguments", lambda _: ())],
    ),
}  # fmt: skip
FEW = {"outputs are not copied", "one slot serves two forwards"}


@pytest.mark.parametrize("broken", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in BROKEN])
def test_control_a_broken_rule_shows(broken, recorders, monkeypatch):
    name, rules = BROKEN[broken]
    expected = run(name, "false")
    for rule in rules:
        monkeypatch.setattr(*rule)
    found = []
    # Of a backward whose values are gone, and of a hook of a gradient that is None.
    with contextlib.suppress(RuntimeError, TypeError, AttributeError):
        found = run(name, "true")
    assert not found or differences(found, expected)

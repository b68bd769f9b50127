"""Loops with recorded calls: the same bits as without, or not recorded, with the reason in the report."""

import contextlib
import re

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.capture.conversion import _attached
from amp_graph.replay import guard_set, replayed_call, replays, slots
from tests.replay import loops, stand_in
from tests.replay.loops import DECLINED, LOOPS


@pytest.fixture
def recorders(monkeypatch):
    return stand_in.install(monkeypatch).made


def run(name, word):
    torch.manual_seed(0)
    with contextlib.suppress(ValueError):
        return LOOPS[name](word)
    raise AssertionError("a loop keeps its exceptions")


def differences(found, expected):
    assert len(found) == len(expected)
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a.nan_to_num(), b.nan_to_num())]


def reasons():
    """What the reports of all models that are converted at the moment say of recordings."""
    return "\n".join(note for one in _attached for note in amp_graph.report(one.model).notes if "replay" in note)


@pytest.mark.parametrize("name", LOOPS)
def test_a_recorded_loop_has_the_bits_of_one_that_is_not(name, recorders, monkeypatch):
    told = []
    plain = loops.converted
    monkeypatch.setattr(loops, "converted", lambda *a, **k: told.append(plain(*a, **k)) or told[-1])
    found = run(name, "true")
    notes = "\n".join(note for model in told for note in amp_graph.report(model).notes if "replay" in note)
    replayed = sum(r.replayed for r in recorders)
    assert differences(found, run(name, "false")) == []
    if name in DECLINED:
        assert re.search(f"is not recorded.*({DECLINED[name]})", notes), notes
    else:
        assert replayed >= 2, notes
        assert "is not recorded" not in notes

"""A fixed sample of ``make fuzz``, and broken controls that it finds."""

import re
import signal
from dataclasses import replace

import pytest

from amp_graph.errors import PolicyError
from tests.fuzz import run as fuzz
from tests.fuzz.subjects import SUBJECTS

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs the timers of POSIX")


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_input_is_taken_or_refused_as_promised(name):
    found = fuzz.run(SUBJECTS[name], 200, seed=1)  # of lists, some 5 % are taken
    assert not found.faults
    assert found.taken > 5
    assert found.refused > 5
    assert found.taken + found.refused == 200


def test_an_error_that_was_not_promised_is_found():
    faults = fuzz.run(replace(SUBJECTS["lists"], promised=(PolicyError,)), 20, seed=1).faults
    assert "ListError" in faults[0]
    assert "seed 1, number" in faults[0], "which is enough to have it again"


def test_an_input_that_hangs_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT", 0.1)

    def hangs(given):
        re.fullmatch("(a+)+b", "a" * 40)

    faults = fuzz.run(replace(SUBJECTS["policies"], call=hangs), 2, seed=1).faults
    assert len(faults) == 2
    assert "takes over 0.1 s" in faults[0]


def test_a_check_that_is_gone_is_found(monkeypatch):
    """The control: a policy that does not look at the values of its words."""
    monkeypatch.setattr("amp_graph.policy.stored", lambda field, value: value)
    faults = fuzz.run(SUBJECTS["policies"], 400, seed=1).faults
    assert any("TypeError" in fault or "AttributeError" in fault for fault in faults)


def test_a_seed_gives_the_same_inputs():
    made = [str(fuzz.run(replace(SUBJECTS["input specs"], prepare=lambda: None), 50, seed=7).refused) for _ in range(2)]
    assert made[0] == made[1]

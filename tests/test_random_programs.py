"""A fixed sample of the random programs; all 5,000 run as ``python -m tests.random_programs``."""

from functools import cache

import pytest

import amp_graph
from amp_graph.passes.graph.aliasing import Memory
from amp_graph.passes.precision import lookahead, predict_time
from tests.random_lines import VIEWS, WRITES
from tests.random_programs import Line, Plan, check, compare, grow

SEEDS = range(12)


@cache
def planned(seed):
    return grow(seed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_converted_program_differs_from_eager_by_rounding_only(seed):
    assert not check(planned(seed)).wrong, str(planned(seed))


def test_a_view_of_what_was_written_is_returned_in_fp16(monkeypatch):
    """A hook on such a result, for the advice on loss scaling, ended the process."""
    monkeypatch.setattr(predict_time, "WORTH_IT", 0.0)
    assert not check(grow(870_356)).wrong


def test_the_sample_reaches_what_it_is_for():
    lines = [line for seed in SEEDS for line in planned(seed).lines]
    assert len({line.name for line in lines if line.kind == "view"} & VIEWS.keys()) > 18
    assert len({line.name for line in lines if line.kind == "write"} & WRITES.keys()) > 12
    plans = [planned(seed) for seed in SEEDS]
    assert sum(p.trains for p in plans) > 4
    assert sum(p.aliased for p in plans) > 1


# One write through a view of no known class.
LOST = Plan(
    1,
    (Line("operation", "first", (0, 0)), Line("view", "as_strided", (3,)), Line("write", "mul_", (4, 0))),
    (),
    False,
    False,
    "bf16",
    sums=True,
)


def test_a_control_without_aliases_is_found(monkeypatch):
    """With the analysis of aliases off, writes are lost: by the smallest program, and by some of the sample."""
    assert not check(LOST).wrong
    monkeypatch.setattr(lookahead.Lookahead, "_shown", lambda self: {})
    assert check(LOST).wrong


def test_a_control_without_writes_is_found(monkeypatch):
    monkeypatch.setattr(Memory, "epoch", lambda self, node, reader: 0)
    monkeypatch.setattr(Memory, "is_written", lambda self, node: False)
    monkeypatch.setattr(Memory, "written_after", lambda self, node: frozenset())
    assert any(compare(planned(seed)).wrong for seed in SEEDS)


def test_a_control_that_adds_an_error_is_found():
    def wrong(model, policy):
        converted = amp_graph.convert(model, policy)
        return lambda *inputs: tuple(t * 1.5 if t.is_floating_point() else t for t in converted(*inputs))

    assert any("error" in one for one in check(LOST, wrong).wrong)

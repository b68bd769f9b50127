"""Dropout that drops nothing is removed, and no bit changes; the rest stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.base import PassResult
from amp_graph.passes.recognize.no_op_dropout import RemoveNoOpDropout
from tests.passes.graphs import Function, capture_function, differences, run_step, with_and_without

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)) / 3

LEFT_OUT = {
    "in evaluation": lambda s, x: F.dropout(x @ s.w, 0.5, False) @ s.w,
    "by name": lambda s, x: F.dropout(input=x @ s.w, training=False).relu(),
    "of nothing": lambda s, x: F.dropout(x @ s.w, 0.0).exp(),
    "torch's": lambda s, x: torch.dropout(x @ s.w, 0.1, train=False).exp(),
    "and written": lambda s, x: ((h := x @ s.w), F.dropout(h, 0.1, False).mul_(2)),
}
KEPT = {
    "that drops": lambda s, x: F.dropout(x @ s.w, 0.5),
    "of all": lambda s, x: F.dropout(x @ s.w, 1.0, True),
    "of whole channels": lambda s, x: F.dropout1d(x @ s.w, 0.5, True),
    "in place": lambda s, x: F.dropout(x @ s.w, 0.1, False, inplace=True).add_(1),
    "in place, by position": lambda s, x: F.dropout(x @ s.w, 0.1, False, True).add_(1),
    "by torch": lambda s, x: torch.dropout(x @ s.w, 0.5, True),
}


def passed(function):
    return with_and_without(RemoveNoOpDropout(), capture_function(function, X, w=W))


@pytest.mark.parametrize("name", LEFT_OUT)
def test_it_is_left_out_and_no_bit_changes(name):
    plain, ours, given, result = passed(LEFT_OUT[name])
    assert [c.action for c in result.changes] == ["deleted"]
    assert not any("dropout" in n.name for n in ours.graph.nodes)
    assert not differences(run_step(ours, given), run_step(plain, given))


@pytest.mark.parametrize("name", KEPT)
def test_what_drops_is_left_alone(name):
    assert not passed(KEPT[name])[3].changes


def test_what_is_read_through_it_is_computed_again():
    """A GELU behind which a dropout of 0 stood was saved for the linear behind that."""
    model = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Dropout(0.0), nn.Linear(512, 512))
    amp_graph.convert(model, "bf16,recompute=all")(X).sum().backward()
    assert "gelu_computed_again" in amp_graph.report(model).graphs[-1].text


THROUGH = {
    "in evaluation": (lambda h: F.dropout(h, 0.1, False).mul_(2), lambda h: h.mul_(2)),
    "of nothing": (lambda h: F.dropout(h, 0.0, True).add_(1), lambda h: h.add_(1)),
    "torch's, then a view": (
        lambda h: torch.dropout(h, 0.1, False).view(-1)[9:].zero_(),
        lambda h: h.view(-1)[9:].zero_(),
    ),
    "twice": (lambda h: F.dropout(F.dropout(h, 0.1, False), 0.3, False).neg_(), lambda h: h.neg_()),
}


def read_twice(write, policy="bf16"):
    """Return what reads a product in fp32, before and after a write to it."""

    def function(s, x):
        h = x @ s.w
        before = h.exp()
        written = write(h)
        return before, h.exp(), written

    torch.manual_seed(0)
    model = Function(function, w=torch.randn(64, 64) / 8)
    with torch.no_grad():
        return amp_graph.convert(model, policy, strict=True)(torch.randn(16, 64))


@pytest.mark.parametrize("policy", ["bf16", "bf16,lists=autocast_cpu", "bf16,accuracy=fast"])
@pytest.mark.parametrize("name", THROUGH)
def test_a_write_through_it_is_a_write_to_its_input(name, policy):
    through, directly = THROUGH[name]
    found, expected = read_twice(through, policy), read_twice(directly, policy)
    assert all(map(torch.equal, found, expected))


def test_without_the_pass_a_stale_cast_is_read(monkeypatch):
    monkeypatch.setattr(RemoveNoOpDropout, "run", lambda self, gm: PassResult(gm))
    through, directly = THROUGH["in evaluation"]
    assert (read_twice(through)[1] - read_twice(directly)[1]).abs().max() > 0.5

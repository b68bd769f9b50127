"""Whose memory a value has, and who reads it last: views and writes are seen."""

import pytest
import torch

from amp_graph.passes.graph import liveness
from amp_graph.passes.graph.liveness import Lifetimes
from amp_graph.passes.torch_compat.fake import make_fx

X, Y = torch.randn(6, 8), torch.randn(6, 8)
FREE = {
    "a temporary": lambda x, y: x.sin() + y,
    "read before": lambda x, y: ((s := x.sin()).cos(), s + y),
    "a view of a temporary": lambda x, y: x.sin().view(48) + y.view(48),
    "written before": lambda x, y: (s := x.sin(), s.mul_(2), s + y)[2],
}
HELD = {
    "an input": lambda x, y: x + y,
    "a view of an input": lambda x, y: x.view(48) + y.view(48),
    "returned": lambda x, y: ((s := x.sin()) + y, s),
    "read again": lambda x, y: ((s := x.sin()) + y) * s,
    "a view of it is read again": lambda x, y: (s := x.sin(), v := s.view(48).view(6, 8), (s + y) * v)[2],
    "a part of it is read again": lambda x, y: (s := x.sin(), v := s[0], (s + y).sum() * v)[2],
}


def is_done(function):
    """Whether the sum in the graph of ``function`` is the last to read its first summand."""
    gm = make_fx(function, tracing_mode="fake")(X, Y)
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    return Lifetimes.of(gm).is_done_after(node.args[0], node, node)


@pytest.mark.parametrize("name", [*FREE, *HELD])
def test_who_reads_the_memory_last(name):
    assert is_done((FREE | HELD)[name]) == (name in FREE)


def test_aliases_that_are_not_seen_are_the_control(monkeypatch):
    monkeypatch.setattr(liveness, "_aliased", lambda node, op: [])
    assert is_done(HELD["a view of it is read again"])

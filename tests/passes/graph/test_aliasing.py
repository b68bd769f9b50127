"""Storages and writes, as memory.observe reads them."""

import pytest
import torch

from amp_graph.passes.graph.aliasing import observe
from amp_graph.passes.manager import run_passes
from amp_graph.passes.precision.plan_precision import PlanPrecision, marks
from tests.passes.graphs import capture_function, node_named, passes_until

X, W = torch.randn(4, 4), torch.randn(4, 4)


def observed(function):
    gm = capture_function(function, X, w=W).fresh()
    run_passes(gm, passes_until(PlanPrecision), checked=True)
    return gm, observe(gm, marks(gm))


def viewed(s, x):
    h = x @ s.w
    v = h[:2]
    r = h.relu()
    v.add_(1.0)
    return h.tanh(), r


def test_a_write_to_a_view_is_a_write_to_its_base():
    gm, memory = observed(viewed)
    h, v, r = (node_named(gm, n) for n in ("h", "v", "r"))
    assert memory.is_written(h)
    assert memory.is_written(v)
    assert not memory.is_written(r)


def test_epochs_part_readers_before_and_after_a_write():
    gm, memory = observed(viewed)
    h, r = node_named(gm, "h"), node_named(gm, "r")
    tanh = next(n for n in gm.graph.nodes if n.target == "tanh")
    assert memory.epoch(h, r) == 0
    assert memory.epoch(h, tanh) == 1
    assert memory.epoch(r, tanh) == 0


def set_item(s, x):
    h = x @ s.w
    h[0] = 1.0
    return h


def in_place(s, x):
    h = x @ s.w
    h += x
    return h


def copied(s, x):
    h = x @ s.w
    h.copy_(x)
    return h


def out(s, x):
    h = torch.empty(4, 4)
    torch.add(x, 1.0, out=h)
    return h


def indexed(s, x):
    h = x @ s.w
    h.index_add_(0, torch.arange(4), x)
    return h


def relu_(s, x):
    return torch.nn.functional.relu(h := x @ s.w, inplace=True) + h


@pytest.mark.parametrize("function", [set_item, in_place, copied, out, indexed, relu_])
def test_each_way_to_write_is_seen(function):
    gm, memory = observed(function)
    assert any(memory.is_written(n) for n in gm.graph.nodes if n.op != "placeholder")
    sources = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert not any(memory.is_written(n) for n in sources), "what is read is not written"


@pytest.mark.parametrize("function", [lambda s, x: x.add_(1.0), lambda s, x: x.view(-1)[3:].zero_()])
def test_a_write_to_an_input_is_seen(function):
    gm, memory = observed(function)
    assert any(memory.is_written(n) for n in gm.graph.nodes if n.op == "placeholder")

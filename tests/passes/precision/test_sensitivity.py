"""What a rounding does to the loss: by rule on graphs small enough to know, and measured as size times gradient."""

import math

import pytest
import torch
import torch.nn.functional as F

from amp_graph.passes.precision.sensitivity import Measured, MeasureInfluence, influence_by_rule
from tests.passes.graphs import capture_function
from tests.passes.planning import problem_of


def planned(function, *inputs, **state):
    graph = capture_function(function, *inputs, **state)
    return graph, problem_of(graph)[0]


def by_rule(function, outputs=8):
    """What rules say of a graph of one input and one weight."""
    return influence_by_rule(planned(function, torch.randn(4, 8), w=torch.randn(outputs, 8))[1])


def of(name, values):
    return next(part for node, part in values.items() if node.name == name)


# -- by rule ------------------------------------------------------------------------------------------------


def test_a_chain_has_it_all():
    found = by_rule(lambda m, x: torch.tanh(F.linear(torch.tanh(x), m.w)))
    assert [of(name, found.values) for name in ("tanh", "linear", "tanh_1")] == [1.0, 1.0, 1.0]


def test_a_branch_has_its_part_and_the_stream_all():
    def f(m, x):
        x = x + F.linear(torch.tanh(x), m.w)
        return x + F.linear(F.layer_norm(x, (8,)), m.w)

    found = by_rule(f)
    readings = {(a.name, b.name): part for (a, b), part in found.readings.items()}
    assert of("x", found.values) == pytest.approx(1.0)  # 2/3 by itself, 1/3 through the norm
    assert readings["x", "layer_norm"] == of("linear_1", found.values) == pytest.approx(1 / 3)
    assert of("linear", found.values) == pytest.approx(1 / 2)


def test_what_is_written_has_the_influence_of_who_reads_its_memory_later():
    def f(m, x):
        y = x * 2.0
        y[:, :4].add_(F.linear(x, m.w))
        return y.exp()

    found = by_rule(f, outputs=4)
    assert of("linear", found.values) == pytest.approx(0.5)  # half of a sum of like sizes
    assert of("add_", found.values) == 1.0


def test_what_no_output_needs_has_none():
    found = by_rule(lambda m, x: (F.linear(x, m.w), F.linear(x, m.w) + 1)[0])
    assert of("linear", found.values) == 1.0
    assert all(part == 0 for node, part in found.values.items() if node.name in ("linear_1", "add"))


# -- measured -----------------------------------------------------------------------------------------------


def net(m, x):
    h = torch.tanh(F.linear(x, m.up))
    return h + F.linear(torch.tanh(h * h) - 0.5 * h, m.down)


def measured(function, *inputs, **state):
    graph, problem = planned(function, *inputs, **state)
    run = MeasureInfluence(problem.gm, problem.memory)
    out = run.run(*graph.given)[0]
    torch.manual_seed(1)
    torch.autograd.grad((out * torch.randn(out.shape)).sum(), run.leaves)
    return graph, problem, run.measured()


def state():
    torch.manual_seed(0)
    return {"up": torch.randn(24, 16) / 4, "down": torch.randn(24, 24) / 5}


def test_a_reading_is_its_size_times_its_gradient():
    x, w = torch.randn(5, 3), torch.randn(3, 3)
    _, _, found = measured(lambda m, x: F.linear(x, m.w) * 2.0, x, w=w)
    torch.manual_seed(1)
    cotangent = torch.randn(5, 3)
    (linear,) = {a for a, _ in found.readings if a == "linear"}
    (reader,) = {b for a, b in found.readings if a == linear}
    want = (F.linear(x, w) * 2.0 * cotangent).double().square().sum().item()
    assert found.readings[linear, reader] == pytest.approx(want, rel=1e-5)
    weight = next(v for (a, b), v in found.readings.items() if b == linear and "w" in a.split("_")[-2:])
    assert weight == pytest.approx((w * (2 * cotangent.T @ x)).double().square().sum().item(), rel=1e-5)


def test_what_no_gradient_reaches_has_its_part_by_rule():
    def f(m, x):
        gate = torch.sigmoid(F.linear(x, m.w)).detach()
        return F.linear(x, m.w) * gate, F.linear(x, m.w)

    _, problem, found = measured(f, torch.randn(4, 8), w=torch.randn(8, 8))
    influence = found.of(problem)
    assert influence.origin == "measured"
    assert ("sigmoid", "gate") not in found.readings
    assert of("sigmoid", influence.values) > 0
    assert of("linear_2", influence.values) == 0  # an output that the loss leaves alone


def test_another_graph_is_none_of_its_business():
    _, problem, found = measured(net, torch.randn(32, 16), **state())
    _, longer = planned(lambda m, x: net(m, x).tanh(), torch.randn(32, 16), **state())
    _, wider = planned(net, torch.randn(48, 16), **state())
    assert found.of(longer) is None
    assert found.of(wider).origin == found.of(problem).origin == "measured"
    assert Measured(found.skeleton, {}).of(problem) is None


def test_values_that_are_written_are_measured_before_they_are():
    def f(m, x):
        y = F.linear(x, m.w)
        first = y * 2.0
        y.add_(1.0)
        return first + y * 3.0

    _, problem, found = measured(f, torch.randn(4, 8), w=torch.randn(8, 8))
    influence = found.of(problem)
    assert of("y", influence.values) > 0
    assert torch.isfinite(torch.tensor(list(influence.values.values()))).all()


def test_infinities_of_a_mask_are_no_influence():
    def f(m, x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        return (F.linear(x, m.w) + mask).softmax(-1)

    _, problem, found = measured(f, torch.randn(4, 4), w=torch.randn(4, 4))
    values = found.of(problem).values
    assert all(math.isfinite(part) for part in values.values())
    assert of("linear", values) > 0

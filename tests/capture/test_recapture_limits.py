"""Calls that differ in a number: it becomes a symbol, or captures end; results are those of the model as written.

Each model is called beside a copy in fp32 that is not converted, and both keep their own counters.
"""

import copy
import math
import random
import re

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.recapture_limits import MOST
from amp_graph.errors import AmpGraphWarning, CaptureError
from tests.by_hand import twins
from tests.layers import forward_of, layers
from tests.relative_error import error
from tests.warned import heard, warnings_are_errors

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
STEPS = 12


@layers(
    lambda depth=2: dict(
        a=nn.Linear(16, 16), b=nn.Linear(16, 4), layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
    ),
    calls=0,
)
def Net(self, x):
    return self.b(self.a(x))


@forward_of(Net)
def Counter(self, x):
    self.calls += 1
    return self.b(self.a(x) * min(1.0, self.calls / 20))


@forward_of(Net)
def InverseRoot(self, x):
    self.calls += 1
    return self.b(torch.relu(self.a(x))) * self.calls**-0.5 + math.cos(self.calls / 10)


@forward_of(Net, tau=1.0)
def Annealed(self, x):
    self.tau *= 0.95
    return torch.softmax(self.b(self.a(x)) / self.tau, -1)


@layers(lambda: dict(parts=nn.Sequential(Counter(), nn.Linear(4, 16), Annealed())), base=Net)
def Inside(self, x):
    return self.parts(x)


@forward_of(Net)
def Epoch(self, x, epoch, rate=1.0):
    return self.b(self.a(x) * rate) / (epoch + 1)


@forward_of(Net, active=0)
def Curriculum(self, x):
    self.active += 1
    for layer in self.layers[: self.active]:
        x = x + layer(x)
    return self.b(x)


@forward_of(Net)
def Repeated(self, x, times):
    for _ in range(int(times)):
        x = torch.tanh(self.a(x))
    return self.b(x)


@forward_of(Net)
def UntilSmall(self, x):
    h = self.a(x)
    while h.norm() > 1:
        h = h * 0.7
    return self.b(h)


@forward_of(Net)
def StopsEarly(self, x):
    for layer in self.layers:
        x = layer(x)
        if x.norm() < 0.5:
            break
    return self.b(x)


@forward_of(Net)
def Named(self, x, mode):
    return self.b(self.a(x)) if mode == "both" + mode[4:] else self.a(x)


@layers(lambda: dict(layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), random=random.Random(1)), base=Net)
def Dropped(self, x):
    for layer in self.layers:
        if self.random.random() > 0.5:
            x = layer(x)
    return self.b(x)


@forward_of(Net)
def Speaking(self, x):
    self.calls += 1
    h = self.a(x)
    print("", end="")
    for _ in range(self.calls):
        h = torch.tanh(self.a(h))
    return self.b(h)


def called(model, calls, **options):
    """Call a converted copy of ``model`` and the model itself in turn; return (its conversion, warnings)."""
    converted = amp_graph.convert(copy.deepcopy(model), "bf16", **options)
    with heard() as seen:
        for args in calls:
            found, wanted = converted(*args), model(*args)
            assert found.dtype == wanted.dtype
            assert error(found, wanted) < 0.05, args[1:]
    return conversion_of(converted), [str(one.message) for one in seen if one.category is AmpGraphWarning]


def same(*args):
    return [(X, *args)] * STEPS


@pytest.mark.parametrize(
    ("kind", "calls", "most"),
    [
        (Counter, same(), 4),
        (InverseRoot, same(), 4),
        (Annealed, same(), 3),
        (Inside, same(), 5),
        (Epoch, [(X, n, 0.9**n) for n in range(STEPS)], 4),
        (Epoch, [(torch.cat([X] * 3)[: n + 2], n) for n in range(STEPS - 2)], 4),
    ],
)
def test_a_number_that_changes_becomes_a_symbol(kind, calls, most):
    conversion, warned = called(kind(), calls)
    assert len(conversion.graphs) <= most
    assert conversion.runs == len(calls)
    assert not warned


@pytest.mark.parametrize("policy", ["fp16", "bf16-O2"])
def test_a_counter_under_other_policies(policy):
    model, converted = twins(Counter, policy)
    for _ in range(8):
        found, wanted = converted(X), model(X)
        assert error(found, wanted) < 0.05
        found.sum().backward()
    assert len(conversion_of(converted).graphs) <= 3
    assert converted.calls == 8


@pytest.mark.parametrize(
    ("kind", "calls", "what"),
    [
        (lambda: Curriculum(depth=STEPS), same(), r"self\.active"),
        (Repeated, [(X, n) for n in range(STEPS)], "times"),
        (Repeated, [(X, torch.tensor(n)) for n in range(STEPS)], r"times.item\(\)"),
        (Named, [(X, f"both{n}") for n in range(STEPS)], "mode"),
    ],
)
def test_captures_end_where_no_symbol_can_be_had(kind, calls, what):
    conversion, (warned,) = called(kind(), calls, max_graphs=5)
    assert len(conversion.graphs) == 5
    assert conversion.runs == 5
    assert re.search(f"captured 5 times.*under torch.autocast.*differ in {what}", warned)
    assert "max_graphs" in warned
    assert any("captured 5 times" in note for note in amp_graph.report(conversion.model).notes)


def test_graphs_that_are_kept_go_on_being_used():
    conversion, _ = called(Repeated(), [(X, n) for n in range(8)], max_graphs=4)
    runs = conversion.runs
    for n in [1, 2, 3] * 10:
        conversion.model(X, n)
    assert conversion.runs >= runs + 30
    conversion.model.eval()  # which has no calls without graphs yet
    conversion.model(X, 9)
    assert len(conversion.graphs) == 4


@pytest.mark.parametrize("kind", [UntilSmall, StopsEarly, Dropped])
def test_loops_and_branches_on_values_are_not_tried_for_ever(kind, monkeypatch):
    tried = []
    runners = amp_graph.capture.captured_graphs.CapturedGraphs
    plain = runners.start
    monkeypatch.setattr(runners, "start", lambda self: tried.append(1) or plain(self))
    conversion, _ = called(kind(), [(X * (n + 1),) for n in range(40)])
    assert len(tried) <= 3
    assert len(conversion.graphs) <= MOST


def test_pieces_of_a_call_are_counted_by_place():
    # Without layers that it never reads: a call with graphs that leave out weights is not captured again.
    conversion, (warned,) = called(Speaking(depth=0), same(), max_graphs=3)
    assert len(conversion.graphs) == 2 * 3
    assert conversion.runs == 2 * 3 + STEPS - 3, "the first piece has a graph in every call, the second in three"
    assert "code without one runs in fp32 from now on: they differ in self.calls (" in warned


def test_strict_conversions_raise():
    model = amp_graph.convert(Repeated(), "bf16", strict=True, max_graphs=2)
    model(X, 1), model(X, 2)
    with pytest.raises(CaptureError, match="differ in times"):
        model(X, 3)


@pytest.mark.parametrize("count", [0, -1, 2.0, "16", None, True])
def test_numbers_of_graphs_that_make_no_sense_are_refused(count):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for door, more in ((amp_graph.convert, ()), (amp_graph.TrainStep, (torch.sum, optimizer))):
        with pytest.raises(CaptureError, match="legal: a whole number"):
            door(model, *more, policy="bf16", max_graphs=count)
    assert conversion_of(model) is None


def test_users_errors_take_no_graphs():
    model = amp_graph.convert(Repeated(), "bf16", max_graphs=3)
    for _ in range(5):
        with pytest.raises(RuntimeError):
            model(torch.randn(8, 3), 1)
        model(X, 1)
    with warnings_are_errors():
        model(X, 2)


def test_what_dynamo_forgets_is_not_counted():
    conversion, _ = called(Repeated(), [(X, n) for n in range(3)], max_graphs=2)
    torch._dynamo.reset()
    conversion.model(X, 5)
    assert len(conversion.graphs) == 3


def test_modes_and_orders_are_few_graphs():
    @forward_of(Net)
    def Options(self, x, options):
        total = sum(value for value in options.values())
        return self.b(nn.functional.dropout(self.a(x), 0.0, self.training)) * total

    model, converted = twins(Options)
    for n in range(8):
        options = {"a": 1.0, "b": 2.0} if n % 2 else {"b": 2.0, "a": 1.0}
        for one in (model, converted):
            one.train(n % 4 < 2)
        assert error(converted(X, options), model(X, options)) < 0.05
    assert len(conversion_of(converted).graphs) <= 4

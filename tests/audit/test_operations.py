"""What is seen of operations: their phase, module and line, and who cast what."""

import importlib
import sys
import threading

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.audit.events import HEARD
from amp_graph.audit.session import Audit
from amp_graph.passes.torch_compat.dispatch import has_modes
from tests.layers import layers


@layers(lambda: dict(first=nn.Linear(8, 16), second=nn.Linear(16, 4)))
def TwoLayers(self, x):
    return self.second(self.first(x).float())


def calls_of(train, **options):
    """Return the operations of ``train(model, optimizer)``, as a list of (call, totals)."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit(looks=(1,), **options) as audit:
        train(model, optimizer)
    assert not audit.training.unseen
    return audit.training.calls.items()


def backward_of(model):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(3, 8)).square().mean()
    loss.backward()
    return loss


def step(model, optimizer):
    backward_of(model)
    optimizer.step()


def step_by_closure(model, optimizer):
    optimizer.step(lambda: backward_of(model))


@pytest.mark.parametrize("train", [step, step_by_closure])
def test_each_operation_has_its_phase_and_its_module(train):
    products = {
        (c.phase, c.module) for c, _ in calls_of(train) if c.operator in ("aten.addmm.default", "aten.mm.default")
    }
    assert products == {(phase, module) for phase in ("forward", "backward") for module in ("first", "second")}
    assert any("add_" in c.operator for c, _ in calls_of(train) if c.phase == "update")
    assert all(c.place.file.endswith("test_operations.py") for c, _ in calls_of(train) if c.module)


def test_a_cast_is_autocasts_or_the_users():
    casts = {(c.cast, c.module, c.output): t.calls for c, t in calls_of(step) if c.operator.startswith("aten._to_copy")}
    forward = {key: calls for key, calls in casts.items() if key[0]}
    assert forward == {
        ("autocast", "first", "bfloat16"): 3,  # input, weight and bias
        ("user", "", "float32"): 1,
        ("autocast", "second", "bfloat16"): 3,
    }


LIBRARY = """
import torch

def head(x, weight):
    return x.float() @ weight  # line 5

def twice(x):
    return x.to(torch.bfloat16), x.to(torch.bfloat16)  # line 8

def there_and_back(x):
    return x.float().to(torch.bfloat16)  # line 11
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module that is installed, and casts."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "of_others.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    yield importlib.import_module("of_others")
    del sys.modules["of_others"]


class Own:
    """The same in the user's file."""

    head = staticmethod(lambda x, weight: x.float() @ weight)
    twice = staticmethod(lambda x: (x.to(torch.bfloat16), x.to(torch.bfloat16)))
    there_and_back = staticmethod(lambda x: x.float().to(torch.bfloat16))


@pytest.mark.parametrize("is_library", [True, False])
def test_a_cast_in_a_library_is_the_librarys_and_the_users_line_is_where_it_is_called(library, is_library):
    uses = library if is_library else Own

    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit(looks=(1, 2)) as audit:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                low = model(torch.randn(64, 8))
            uses.twice(torch.randn(4096))
            uses.there_and_back(low.detach() * 1)
            uses.head(low, torch.randn(4, 64)).mean().backward()
            optimizer.step()
    report = audit.report()
    casts = {f.code: f for f in report.findings if f.code in ("AMP604", "AMP702", "AMP703")}
    by = {"AMP604": "of_others:5 (head)", "AMP702": "of_others:8 (twice)", "AMP703": "of_others:11 (there_and_back)"}
    assert {*casts} == {*by}
    for code, cast in casts.items():
        assert (f"in {by[code]}, called from" in cast.text) == is_library
        assert cast.place.file == "tests/audit/test_operations.py"
        assert (cast.place.line > Own.there_and_back.__code__.co_firstlineno) == is_library
    decided = {who for row in report.rows for who in row.decided if who.startswith("cast")}
    assert len({who for who in decided if "of_others" in who and ", called at tests/" in who}) == len(by) * is_library


def test_a_cast_under_a_mode_of_functions_is_the_users_own():
    with torch.device("cpu"):  # which hands each call on
        casts = {(c.cast, c.library) for c, _ in calls_of(step) if c.cast == "user"}
    assert casts == {("user", "")}


@pytest.mark.parametrize(("every", "seen"), [(0, [2, 3]), (5, [2, 3, 5, 10])])
def test_the_second_and_third_step_are_looked_at_and_each_nth(every, seen):
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit(every=every) as audit:
        for _ in range(11):
            step(model, optimizer)
    assert audit.report().looked_at == seen


def test_nothing_of_torch_stays_replaced_where_a_training_raises():
    def functions():
        return [place.__dict__.get(name) for _, place, name in HEARD]

    def fails(model, optimizer):
        assert functions() != before
        raise ZeroDivisionError

    before = functions()
    with pytest.raises(ZeroDivisionError):
        calls_of(fails)
    assert functions() == before


def test_steps_are_those_of_the_optimizer_that_steps_first_and_of_the_next_one_when_it_is_gone():
    with Audit() as audit:
        for _ in range(2):
            first, second = TwoLayers(), TwoLayers()
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
            for _ in range(4):
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    step(model, optimizer)
            del optimizer, optimizers
    assert audit.report().steps == 4 + 3  # it takes one step to see that the first optimizer is gone


def steps_of_one_graph(optimizer, beside=lambda: None, **options):
    """Train by a TrainStep; return the audit, and the weights."""
    torch.manual_seed(0)
    model = TwoLayers()
    run = amp_graph.TrainStep(model, nn.functional.mse_loss, optimizer(model.parameters(), lr=0.1), "bf16")
    with Audit(**options) as audit:
        for _ in range(4):
            run(torch.randn(3, 8), torch.randn(3, 4))
            beside()
    return run, audit, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop], ids=["in the graph", "after the graph"])
def test_a_step_in_one_graph_is_a_step_and_what_it_runs_is_told_to_be_unseen(optimizer):
    _, _, plain = steps_of_one_graph(optimizer, looks=())
    run, audit, audited = steps_of_one_graph(optimizer, every=1)
    assert all(map(torch.equal, plain, audited))
    report = audit.report()
    assert (report.steps, report.looked_at, report.findings) == (4, [], [])
    (place,) = [one for one in report.unseen if "TrainStep" in one]
    assert place.startswith("tests/audit/test_operations.py:")
    assert "print(amp_graph.report(step).text())" in place
    assert amp_graph.report(run).text()
    assert {row.module: {*row.parameters} for row in report.rows if row.parameters} == {
        "first": {"float32"}, "second": {"float32"}
    }  # fmt: skip


def test_what_is_trained_beside_a_step_in_one_graph_is_looked_at():
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, audit, _ = steps_of_one_graph(torch.optim.SGD, lambda: step(model, optimizer))
    assert audit.report().steps == 4
    assert audit.training.looked_at == [2, 3]
    assert sum(t.calls for c, t in audit.training.calls.items() if c.operator == "aten.addmm.default") == 2 * 2


def evaluated(evaluate, steps=6, **options):
    """Audit a training of six steps that calls ``evaluate(model, step)`` behind each; return the audit."""
    model = TwoLayers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Audit(**options) as audit:
        for number in range(1, steps + 1):
            step(model, optimizer)
            evaluate(model, number)
            model.train()
    assert not audit.training.unseen
    return audit.training


def products_in_fp32(training):
    calls = training.calls.items()
    return sum(t.calls for call, t in calls if (call.operator, call.output) == ("aten.addmm.default", "float32"))


def in_evaluation(model, number):
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 8))
        model(torch.randn(3, 8))


@pytest.mark.parametrize("last", [5, 6])
def test_one_call_in_evaluation_is_looked_at_between_steps_and_behind_the_last(last):
    training = evaluated(lambda model, number: in_evaluation(model, number) if number == last else None)
    assert (training.looked_at, training.evaluated) == ([2, 3], last)
    assert products_in_fp32(training) == 2  # of one of both calls


def test_a_call_in_evaluation_is_looked_at_once():
    training = evaluated(in_evaluation, looks=(1,))
    assert (training.looked_at, training.evaluated) == ([1], 1)
    assert products_in_fp32(training) == 2


def test_a_part_in_evaluation_is_none_of_a_model_and_is_not_looked_for_in_each_step():
    modes = []

    def freeze(model, number):
        model.first.eval()
        modes.append(has_modes())

    training = evaluated(freeze, steps=8)
    assert training.evaluated == 0
    assert modes == [True] * 5 + [False] * 3  # in the second step, the third, and three times more
    assert not has_modes()


def test_an_evaluation_that_fails_or_runs_in_another_mode_or_thread_leaves_no_mode_behind():
    def fails(model, number):
        model.eval()
        if number == 4:
            raise KeyError("as the user wrote it")

    with pytest.raises(KeyError, match="as the user"):
        evaluated(fails)
    assert not has_modes()

    def in_thread(model, number):
        thread = threading.Thread(target=model.eval)
        thread.start()
        thread.join()
        assert has_modes() == (number in (1, 2))  # of the steps behind it

    evaluated(in_thread)

"""The search over real models; times are made up where low precision must be fast, which it is not in small models."""

import contextlib
import copy
import importlib
import json
import math
import random
import re
import signal
import statistics
import time

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.devices import machine_name
from amp_graph.errors import AmpGraphError, AmpGraphWarning, PolicyError
from amp_graph.search.bench import Bench, seconds_of, spread_of
from amp_graph.search.result import SearchResult
from amp_graph.search.search import Limits, search
from amp_graph.search.trials import AUTOCAST, FULL, Goal, Trial
from tests.layers import layers, linear_of
from tests.search.made_up_times import low_takes


def nearly_equal(width):
    first = nn.Linear(width, width)
    weight = first.weight.detach() + 0.001 * torch.randn(width, width)
    return dict(first=first, second=linear_of(weight, first.bias.detach()))


@layers(nearly_equal)
def Cancels(self, x):
    """Subtracts two products that are nearly equal: what bf16 rounds in them is most of the difference."""
    return 200 * (self.first(x) - self.second(x))


def mlp(*inside):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), *inside, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def step_of(seed=0):
    drawn = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 32, generator=drawn), torch.randint(8, (64,), generator=drawn)
    return lambda model: nn.functional.cross_entropy(model(x), y)


@pytest.fixture
def _low_is_fast(monkeypatch):
    low_takes(0.5, monkeypatch)


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("bound", [{}, {"budget": 3.0}, {"absolute": 0.02}], ids=str)
def test_held_out_data_that_are_harder_for_autocast_too_may_have_a_larger_error(bound):
    """A sum of what cancels: the further two halves are alike, the more a rounding weighs."""

    def step(noise):
        half = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
        return lambda model: (model(half) - model(half + noise * half.flip(0))).square().mean()

    found = search(mlp(), step(1.0), held_out=step(0.02), **bound)
    error = found.held_out / found.goal.error
    assert (found.policy == FULL) == ("absolute" in bound)
    assert error == 0 if "absolute" in bound else error > 1.1


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("more", [1.0, 1.2])
def test_held_out_data_that_are_easier_for_autocast_ask_for_a_smaller_error(monkeypatch, more):
    hard, easy, real = step_of(), step_of(1), Bench.error

    def error(self, model, step, reference):
        of_policy = more if conversion_of(model) is not None else 1.0
        return real(self, model, step, reference) * (0.5 * of_policy if step is easy else 1.0)

    monkeypatch.setattr(Bench, "error", error)
    found = search(mlp(), hard, held_out=easy)
    assert (found.policy == FULL) == (more == 1.2)
    assert found.held_out < 0.7 * found.goal.error


@pytest.mark.usefixtures("_low_is_fast")
def test_the_answer_is_a_policy_whose_measured_error_is_within_the_budget_also_on_held_out_data():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    found = search(model, step_of(), held_out=step_of(1))
    assert found.best.policy == "bf16-O1"
    assert 0 < found.best.error <= found.goal.error == found.unit
    assert 0 < found.held_out <= 1.1 * found.goal.error
    assert "2.00 times fp32's speed" in found.verdict()
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in before.items())
    converted = amp_graph.convert(model, found.policy)
    assert torch.isfinite(step_of()(converted))


@pytest.mark.usefixtures("_low_is_fast")
def test_a_layer_that_spoils_bf16_is_kept_in_fp32_and_the_rest_is_low():
    found = search(mlp(Cancels(64)), step_of(), absolute=0.02)
    kept = found.policy.partition("keep_ops=")[2].split("|")
    assert {key.partition(":")[0] for key in kept} >= {"2.first", "2.second"}
    assert not {key for key in kept if key.startswith(("0:", "3:"))}
    assert found.best.error <= 0.02
    default = next(one for one in found.trials if one.policy == "bf16-O1")
    assert default.error > 0.02  # the control: without it the budget is not met


def test_where_low_precision_does_not_pay_fp32_is_the_answer(monkeypatch):
    low_takes(1.5, monkeypatch)
    found = search(mlp(), step_of())
    assert found.policy == FULL
    assert len(found.trials) <= 5
    assert "keep fp32: the fastest other policy has 0.67 times its speed here" in found.text()


def test_where_times_are_noisy_the_answer_says_so(monkeypatch):
    low_takes(0.8, monkeypatch, noise=0.6)
    found = search(mlp(), step_of())
    told = "keep fp32: the fastest other policy has 1.25 times its speed here, which is within the noise of 60%"
    assert found.verdict() == told
    warning = "noise of times 60.0% (too much to tell policies apart whose times differ by less);"
    assert warning in found.text()
    low_takes(0.8, monkeypatch, noise=0.09, autocast=0.75)
    quiet = search(mlp(), step_of())
    assert "bf16-O1: 1.25 times fp32's speed" in quiet.verdict()
    assert "faster here" not in quiet.verdict()  # by less than the noise
    assert "too much" not in quiet.text()


def test_policies_whose_turns_overlap_are_measured_again_and_a_search_that_goes_on_keeps_them(monkeypatch, tmp_path):
    file = tmp_path / "search.json"
    low_takes(0.5, monkeypatch, time_of=lambda text: 0.48 if "recompute" in text else 0.5, swing=0.1)
    found = search(mlp(), step_of(), state=file, limits=Limits(without=("level",)))
    assert {one.policy: one.runs for one in found.trials} == {FULL: 1, "bf16-O1": 2, "bf16-O1,recompute=all": 1}
    assert found.best.policy == "bf16-O1,recompute=all"
    assert re.search(r"^bf16-O1 +0.500 .* the default plan; measured 2 times$", found.text(), re.M)
    assert re.search(r"^bf16-O1,recompute=all +0.480 ±10.7% ", found.text(), re.M)
    again = search(mlp(), step_of(), state=file, limits=Limits(without=("level",)))
    assert [(one.policy, one.runs) for one in again.trials] == [(one.policy, one.runs) for one in found.trials]
    low_takes(0.5, monkeypatch, time_of=lambda text: 0.48 if "recompute" in text else 0.5)
    calm = search(mlp(), step_of(), limits=Limits(without=("level",)))
    assert all(one.runs == 1 for one in calm.trials)
    low_takes(0.5, monkeypatch, swing=0.1)
    assert sum(one.runs for one in search(mlp(), step_of(), limits=Limits(runs=3)).trials) == 3


def test_the_spread_of_turns_is_the_standard_error_of_their_median():
    draw = random.Random(0)
    turns = [[draw.gauss(1, 0.1) for _ in range(21)] for _ in range(500)]
    error = statistics.stdev(map(statistics.median, turns))
    assert statistics.mean(map(spread_of, turns)) == pytest.approx(error, rel=0.15)


@pytest.mark.parametrize(("threads", "counts"), [(1, False), (2, True)])
def test_on_one_thread_of_a_cpu_time_in_which_others_compute_is_not_counted(threads, counts):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert (seconds_of(lambda: time.sleep(0.05), 1, "cpu") >= 0.05) == counts
        spent = time.process_time() + 0.02
        assert seconds_of(lambda: [None for _ in iter(lambda: time.process_time() < spent, False)], 1, "cpu") > 0.01
    finally:
        torch.set_num_threads(before)


def overflowing():
    """Return a model whose first linear leaves fp16's range, and the norm behind it comes back into it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    with torch.no_grad():
        model[0].weight *= 3e5
    return model


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def outputs_of(x):
    def step(model):
        with torch.no_grad():
            return model(x)

    return step


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
def test_fp16_keeps_in_fp32_what_overflows_and_the_text_of_the_policy_is_enough(trains):
    model = overflowing().train(trains)
    found = search(model, step_of() if trains else outputs_of(X), policy="fp16", absolute=0.01)
    assert found.policy.startswith("fp16-O1,keep_ops=0:linear|")
    assert found.best.error < 0.002  # bf16's is some 0.004
    assert "fp16 cannot hold their values: 0:linear: its value: max " in found.text()
    assert not {"2:linear", "4:linear"} & set(amp_graph.Policy.parse(found.policy).keep_ops)
    assert not torch.isfinite(amp_graph.convert(overflowing(), "fp16")(X)).all()  # the control
    made = amp_graph.convert(overflowing(), found.policy)
    with torch.no_grad():
        exact, out = overflowing()(X), made(X)
    assert 0 < float((out - exact).norm() / exact.norm()) < 0.002


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("inside", [Cancels(64), nn.Linear(64, 64)], ids=["a layer that spoils bf16", "none"])
def test_without_gradients_the_same_plans_are_proposed_for_a_frozen_model(inside):
    model = mlp(copy.deepcopy(inside)).eval()
    found = search(model, outputs_of(X), absolute=0.02, held_out=outputs_of(X + 1))
    assert found.freeze
    assert found.best.error <= 0.02
    assert 0 < found.held_out <= 0.022
    kept = {key.partition(":")[0] for key in amp_graph.Policy.parse(found.policy).keep_ops}
    assert kept >= ({"2.first", "2.second"} if isinstance(inside, Cancels) else set())
    assert not kept & {"0", "3", "5"}
    assert not any(amp_graph.Policy.parse(one.policy).level == "O2" for one in found.trials)
    converted = amp_graph.freeze(amp_graph.convert(model, found.policy))
    with torch.no_grad():
        assert torch.isfinite(converted(X)).all()


def test_without_gradients_a_metric_sees_a_frozen_model(monkeypatch):
    low_takes(0.5, monkeypatch)
    seen = []

    def metric(model):
        seen.append(type(conversion_of(model)).__name__)
        return 0.1

    found = search(mlp().eval(), outputs_of(X), metric=metric, budget=0.2)
    assert found.best.policy == "bf16-O1"
    assert seen[:3] == ["NoneType", "NoneType", "FrozenConversion"]  # fp32, torch.autocast, and a policy


@pytest.mark.usefixtures("_low_is_fast")
def test_a_users_metric_bounds_the_answer_instead_of_the_error(tmp_path):
    found = search(mlp(), step_of(), metric=lambda model: 0.2, budget=0.3, state=tmp_path / "search.json")
    with pytest.raises(AmpGraphError, match=r"holds another search: metric: 0\.2 there, 0\.25 here"):
        search(mlp(), step_of(), metric=lambda model: 0.25, budget=0.3, state=tmp_path / "search.json")
    assert found.best.policy == "bf16-O1"
    assert found.best.metric == 0.2
    missed = search(mlp(), step_of(), metric=lambda model: 0.4, budget=0.3)
    assert missed.policy == FULL
    assert "no policy is good enough: fp32 itself has a metric of 0.4" in missed.text()
    assert search(mlp(), step_of(), metric=step_of(1), budget=3.0).best.policy == "bf16-O1", "a tensor with gradients"


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("inside", [nn.Dropout(0.5), nn.BatchNorm1d(64)], ids=["dropout", "batch norm"])
def test_each_step_draws_the_same_numbers_and_begins_with_the_same_buffers(inside):
    def step(model):
        return nn.functional.cross_entropy(model(torch.randn(64, 32)), torch.arange(64) % 8)  # a batch of its own

    model = mlp(inside)
    before = torch.get_rng_state()
    found = search(model, step)
    assert found.best.policy == "bf16-O1"
    assert found.best.error < 0.02
    assert torch.equal(torch.get_rng_state(), before)


def scaled_step(model):
    return 1.001 * step_of()(model)


def narrow_step(model):
    return nn.functional.cross_entropy(model(X[:8]), torch.arange(8))


def retrained(model):
    with torch.no_grad():
        model[0].weight *= 1.001
    return model


OTHERS = {
    "another model": (mlp(nn.ReLU(), nn.Linear(64, 64)), step_of(), {}, "parameters and buffers: "),
    "other weights": (retrained(mlp()), step_of(), {}, "gradients: "),
    "another batch": (mlp(), step_of(1), {}, r"output 1: 2\.\d+ there, 2\.\d+ here"),
    "another size of batch": (
        mlp(),
        narrow_step,
        {},
        r"inputs: \['torch.float32 \[64, 32\]'\] there, .*\[8, 32\]'\] here",
    ),
    "another loss": (mlp(), scaled_step, {}, "output 1: "),
    "outputs of another batch": (mlp(), outputs_of(X + torch.eye(64, 32)), {}, "output 0: "),
    "another budget": (mlp(), step_of(), {"absolute": 0.5}, r"budget: \[1.0, 0.02\] there, \[1.0, 0.5\] here"),
}


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("name", OTHERS)
def test_measurements_of_another_search_are_refused_and_what_differs_is_named(name, tmp_path):
    file = tmp_path / "search.json"
    for _ in range(2):
        search(mlp(), step_of(), absolute=0.02, limits=Limits(runs=1), state=file)
    model, step, given, told = OTHERS[name]
    with pytest.raises(AmpGraphError, match=f"holds another search: .*{told}"):
        search(model, step, state=file, **{"absolute": 0.02, **given})
    old = json.loads(file.read_text())
    del old["search"]["inputs"]  # as an older version wrote it
    file.write_text(json.dumps(old))
    with pytest.raises(AmpGraphError, match=r"holds another search: inputs: None there"):
        search(mlp(), step_of(), absolute=0.02, state=file)


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["Python's", "the user's"])
def test_an_interrupt_that_torch_drops_ends_the_search_and_the_handler_is_the_one_before(handler):
    def metric(model):
        if conversion_of(model) is not None:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return 0.1

    before = signal.signal(signal.SIGINT, handler)
    try:
        found = search(mlp(), step_of(), metric=metric, budget=0.2)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    was_heard = handler is signal.default_int_handler
    assert (found.ended == "interrupted; the best so far") == was_heard
    assert (len(found.trials) == 1) == was_heard


def by_policy(text):
    """Return a time that depends on nothing but the policy."""
    return 0.3 + random.Random(text).random() / 2


def test_killed_at_any_point_it_goes_on_to_the_same_proposals(tmp_path, monkeypatch):
    low_takes(0.5, monkeypatch, time_of=by_policy)
    model, file, left = mlp(Cancels(64), nn.Dropout(0.1)), tmp_path / "search.json", iter(range(2))
    torch.manual_seed(1)
    whole = [one.policy for one in search(model, step_of(), absolute=0.02, state=file).trials]
    assert len(whole) >= 4
    told = json.loads(file.read_text())

    def kill(line):
        if next(left, None) is None:
            raise MemoryError  # nothing more happens in a process that is killed

    file.unlink()
    torch.manual_seed(1)
    with pytest.raises(MemoryError):
        search(model, step_of(), absolute=0.02, state=file, tell=kill)
    assert json.loads(file.read_text()) == told | {"trials": told["trials"][:3]}
    for stop in range(1, len(whole)):
        file.write_text(json.dumps(told | {"trials": told["trials"][:stop]}))
        torch.manual_seed(1 + stop)  # another process
        rest = search(model, step_of(), absolute=0.02, state=file)
        assert [one.policy for one in rest.trials] == whole, stop
    file.write_text("{}")
    with pytest.raises(AmpGraphError, match="holds no search"):
        search(model, step_of(), absolute=0.02, state=file)


@pytest.mark.usefixtures("_low_is_fast")
def test_the_number_of_policies_and_the_time_are_limited():
    assert len(search(mlp(), step_of(), limits=Limits(runs=2)).trials) == 2
    assert search(mlp(), step_of(), limits=Limits(seconds=0)).policy == FULL


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    ("share", "autocast", "given", "told"),
    [
        (0.5, 0.4, {}, "bf16-O1.* 2.00 times fp32's .*; torch.autocast is faster here: 2.50 times fp32's speed"),
        (1.5, 0.4, {}, "keep fp32: .*; torch.autocast is faster here: 2.50 times fp32's speed"),
        (0.5, 0.499, {}, "bf16-O1.*torch.autocast's"),  # within the noise
        (0.5, 0.6, {}, "bf16-O1.*torch.autocast's"),
        (0.5, 0.4, {"absolute": 1e-9}, "keep fp32: no faster policy is good enough.*error of [^;]*"),  # nor is it
    ],
)
def test_torch_autocast_is_measured_and_named_where_it_is_faster(monkeypatch, trains, share, autocast, given, told):
    low_takes(share, monkeypatch, autocast=autocast)
    found = search(mlp().train(trains), step_of() if trains else outputs_of(X), **given)
    assert re.fullmatch(told, found.verdict())
    own = copy.deepcopy(mlp())
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(trains):
        out = step_of()(own) if trains else own(X)
    if trains:
        out.backward()
        exact = mlp()
        step_of()(exact).backward()
        pairs = [(one.grad, other.grad) for one, other in zip(own.parameters(), exact.parameters(), strict=True)]
    else:
        pairs = [(out.float(), mlp()(X).detach())]
    wrong, size = (
        math.hypot(*(float(t.norm()) for t in ts)) for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    assert found.autocast.error == pytest.approx(wrong / size, rel=1e-3)
    assert re.search(rf"^torch.autocast +{autocast:.3f} .*to compare", found.text(), re.M)
    assert found.to_dict()["autocast"]["time"] == autocast


@pytest.mark.usefixtures("_low_is_fast")
def test_on_another_machine_convert_says_what_was_not_measured_there(monkeypatch):
    found = search(mlp(), step_of())
    here = machine_name("cpu")
    assert found.policy == f"bf16-O1,measured_on={here}"
    assert found.line() == f'model = amp_graph.convert(model, "{found.policy}")'
    told = json.loads(json.dumps(found.to_dict()))
    assert told["policy"] == found.policy
    assert {"policy", "time", "error", "why"} <= set(told["trials"][0])
    amp_graph.convert(mlp(), found.policy)  # a warning is an error here
    again = search(mlp(), step_of(), policy=found.policy)
    assert again.policy == found.policy
    monkeypatch.setattr(importlib.import_module("amp_graph.convert"), "machine_name", lambda device: "toaster")
    told = rf"the time, memory and error of '{found.policy}' were measured on {here}, and not on this toaster"
    with pytest.warns(AmpGraphWarning, match=told):
        assert torch.isfinite(step_of()(amp_graph.convert(mlp(), found.policy)))
    amp_graph.convert(mlp(), "bf16")


def test_the_table_says_of_each_policy_whether_it_was_kept_and_why():
    mib = 2**20
    trials = [
        Trial(FULL, 1.0, 0.0, memory=40 * mib, why="a"), Trial("bf16-O1", 0.6, 0.004, memory=20 * mib, why="b"),
        Trial("bf16-O1,accuracy=1.2", 0.5, 0.0052, memory=20 * mib, why="c"),
        Trial("bf16-O1,accuracy=fast", 0.4, 0.011, memory=20 * mib, why="d"),
        Trial("bf16-O1,replay=true", 0.4, 0.004, memory=90 * mib, why="e"), Trial("fp16-O1", *[math.inf] * 3, why="f"),
    ]  # fmt: skip
    goal = Goal(error=0.0055, memory=50 * mib)
    own = Trial(AUTOCAST, 0.7, 0.005, memory=30 * mib, why="g")
    found = SearchResult("bf16-O1", trials, goal, own, 0.01, 0.005, "cpu", "its limit", again="amp-graph search m:f")
    head, *rows = found.table()
    assert head == ["policy", "time over fp32's", "speed", "peak memory", "error", "kept", "why it was tried"]
    assert [row[5] for row in rows] == [
        "no: slower", "the answer", "no: beyond the budget on held-out data", "no: 2 times the budget",
        "no: too much memory", "no: fails", "to compare",
    ]  # fmt: skip
    assert [row[3] for row in rows][:2] == ["40.0 MiB", "20.0 MiB"]
    assert found.text().endswith('use:   model = amp_graph.convert(model, "bf16-O1")\nagain: amp-graph search m:f\n')
    by_metric = SearchResult(FULL, [Trial(FULL, 1, 0, 0.2)], Goal(metric=0.3), own, 0.01, math.nan, "cpu", "")
    assert "metric" in by_metric.table()[0]
    assert "use:" not in by_metric.text()  # there is nothing to convert


def random_step(model):
    return model(torch.randn(4, 32, generator=random_step.drawn)).sum()


random_step.drawn = torch.Generator().manual_seed(0)
WRONG = {
    "a step that draws data": (dict(step=random_step), AmpGraphError, "two runs of step on the same model differ"),
    "no tensor": (dict(step=lambda model: model(torch.ones(1, 32)).sum().item()), AmpGraphError, "returned a float"),
    "no call": (dict(step=lambda model: torch.ones(())), AmpGraphError, "does not call the model"),
    "a loss that is NaN": (
        dict(step=lambda model: model(X).sum() * math.nan),
        AmpGraphError,
        "the loss of step is not f",
    ),
    "an infinite gradient": (
        dict(step=lambda model: (model(X) * 0).sqrt().sum()),
        AmpGraphError,
        "gradient of .* not fin",
    ),
    "a metric that is NaN": (dict(metric=lambda model: math.nan, budget=1), AmpGraphError, "in fp32 is nan"),
    "a metric that is no number": (dict(metric=lambda model: "low", budget=1), AmpGraphError, "in fp32 is 'low'"),
    "a metric that is nothing": (dict(metric=lambda model: None, budget=1), AmpGraphError, "in fp32 is None"),
    "a negative budget": (dict(budget=-1), PolicyError, "no budget"),
    "two budgets": (dict(metric=lambda model: 0, absolute=1), PolicyError, "metric with absolute"),
    "a metric alone": (dict(metric=lambda model: 0), PolicyError, "metric without budget"),
    "two bounds of the error": (dict(budget=1.5, absolute=1), PolicyError, "absolute with budget"),
}


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize("name", WRONG)
def test_bad_input_gets_one_clear_error(name):
    given, kind, text = WRONG[name]
    with pytest.raises(kind, match=text) as raised:
        search(mlp(), **{"step": step_of(), **given})
    assert "fix:" in str(raised.value)


@pytest.mark.parametrize("given", [dict(runs=0), dict(runs=-3), dict(seconds=-1.0), dict(seconds=math.nan)])
def test_limits_in_which_nothing_is_measured_are_refused(given):
    with pytest.raises(PolicyError, match=r"are no limits\n.*\n.*fix:"):
        Limits(**given)


@pytest.mark.usefixtures("_low_is_fast")
def test_where_each_policy_fails_by_an_error_it_is_the_answer(monkeypatch):
    def convert(model, policy):
        raise ValueError("only as it was written")

    monkeypatch.setattr(importlib.import_module("amp_graph.search.bench"), "convert", convert)
    with pytest.raises(AmpGraphError, match="fails, but for fp32: ValueError: only as it was written") as raised:
        search(mlp(), step_of())
    assert "fix:" in str(raised.value)


@pytest.mark.usefixtures("_low_is_fast")
def test_where_values_of_each_policy_are_not_finite_fp32_is_the_answer():
    def metric(model):
        return 0.1

    def step(model):
        return step_of()(model) * (1.0 if conversion_of(model) is None else math.inf)

    found = search(mlp(), step, metric=metric, budget=0.2)
    assert found.verdict() == "keep fp32: no other policy runs: a value is not finite"
    assert search(mlp(), step_of(), limits=Limits(runs=1)).verdict() == "keep fp32: no other policy was measured"


@pytest.mark.usefixtures("_low_is_fast")
def test_a_budget_that_cannot_be_met_says_the_nearest():
    found = search(mlp(), step_of(), absolute=1e-9)
    assert found.policy == FULL
    assert re.search(
        r"keep fp32: no faster policy is good enough; the nearest is bf16-O.*, with an error of", found.text()
    )
    nearest = min(one.error for one in found.trials if one.policy != FULL)
    assert f"with an error of {nearest:.3g}" in found.verdict()


@pytest.mark.usefixtures("_low_is_fast")
def test_a_model_that_trains_nothing_is_searched_as_for_inference():
    found = search(mlp().requires_grad_(False), step_of())
    assert found.best.policy == "bf16-O1"
    assert found.freeze
    assert "forward, without gradients, of a frozen model" in found.text()


def test_a_converted_model_is_refused():
    with pytest.raises(AmpGraphError, match="is converted already"):
        search(amp_graph.convert(mlp(), "bf16"), step_of())


@pytest.mark.usefixtures("_low_is_fast")
@pytest.mark.parametrize(
    ("spoils", "ratio", "fits"), [(False, 1.005, True), (True, 1.005, False), (True, 3.0, True)],
    ids=["plain", "one layer that spoils bf16", "loose enough for that layer"],
)  # fmt: skip
def test_a_budget_of_a_metric_holds_on_a_third_set(spoils, ratio, fits):
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, chosen, third = ((x[part], y[part]) for part in (slice(900), slice(900, 1350), slice(1350, None)))
    torch.manual_seed(0)
    inside = (Cancels if spoils else lambda width: nn.Linear(width, width))(64).requires_grad_(not spoils)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), inside, nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()

    def perplexity(model, data):
        with torch.no_grad():
            return math.exp(nn.functional.cross_entropy(model(data[0]).float(), data[1]))

    budget = perplexity(model, chosen) * ratio
    found = search(
        model, lambda one: nn.functional.cross_entropy(one(train[0]), train[1]),
        metric=lambda one: perplexity(one, chosen), budget=budget,
    )  # fmt: skip
    assert found.policy != FULL
    assert found.best.metric <= budget
    answer = amp_graph.convert(copy.deepcopy(model), found.policy)
    assert perplexity(answer, third) <= perplexity(model, third) * ratio * 1.01  # it is another set
    by_rules = next(one for one in found.trials if one.policy == "bf16-O1")
    assert (by_rules.metric <= budget) == fits  # where it misses, the budget is what decides


def test_outputs_of_a_norm_have_gradients_to_compare():
    x = torch.randn(64, 32)
    bench = Bench(nn.Sequential(mlp(), nn.LayerNorm(8)), lambda model: model(x), None)
    gradients = [t for name, t in bench.reference.items() if name.startswith("gradient")]
    assert max(float(t.abs().max()) for t in gradients) > 1e-2  # of the mean of squares, which is 1 always: 1e-6

"""Error budgets from end to end: models train, their gradients stay within the multiple, and the report says so."""

import copy
import pickle
import statistics
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture import sensitivity_sample
from amp_graph.capture.conversion import conversion_of
from amp_graph.capture.sensitivity_sample import measure
from amp_graph.errors import CaptureError, PolicyError
from amp_graph.passes.precision.sensitivity import ONE_NUMBER
from amp_graph.policy import Policy
from tests.corpus.sequence import NanoGPT
from tests.layers import forward_of, layers
from tests.measure_budgets import predicted_and_measured
from tests.passes.planning import machine


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Plan for matrix units, on which models small enough to test are worth lowering."""
    monkeypatch.setattr("amp_graph.passes.precision.plan_precision.machine_for", lambda device: machine("cpu_amx"))


@layers(
    lambda width=32: dict(
        stem=nn.Conv2d(3, width, 3, padding=1),
        convs=nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4)),
        norms=nn.ModuleList(nn.GroupNorm(4, width) for _ in range(4)),
        head=nn.Linear(width, 10),
    )
)
def CNN(self, x):
    x = self.stem(x)
    for conv, norm in zip(self.convs, self.norms, strict=True):
        x = x + F.silu(norm(conv(x)))
    return self.head(x.mean((2, 3)))


def gpt():
    model = NanoGPT(128, 4, 3, 64)
    tokens = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(0))
    return model, lambda m: F.cross_entropy(m(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())


def cnn():
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, 16, 16, generator=drawn), torch.randint(0, 10, (8,), generator=drawn)
    return CNN(), lambda m: F.cross_entropy(m(x), y)


def at_work(build, policy, **options):
    """A converted model, its loss, and the one graph that one step captured."""
    torch.manual_seed(0)
    model, loss = build()
    amp_graph.convert(model, policy, **options)
    loss(model).backward()
    (graph,) = amp_graph.report(model).graphs
    return model, loss, graph


def gradient_ratios(build, multiple):
    """Each parameter's gradient error against fp32, as a ratio to that of autocast's plan."""
    torch.manual_seed(0)
    model, loss = build()
    policies = [Policy.parse(p) for p in ("bf16", f"bf16,accuracy={multiple}")]
    measured = tuple(measured for _, measured in measure(model, policies[1], loss))
    exact = gradients(copy.deepcopy(model), loss)
    usual = statistics.fmean(g.square().mean().sqrt().item() for g in exact.values())
    told = [name for name, g in exact.items() if g.square().mean().sqrt() > 1e-5 * usual]  # the others are 0, rounded
    errors = []
    for policy in policies:
        converted = amp_graph.convert(copy.deepcopy(model), policy)
        conversion_of(converted).measured = measured
        got = gradients(converted, loss)
        errors.append({name: ((got[name] - exact[name]).norm() / exact[name].norm()).item() for name in told})
    base, got = errors
    return [got[name] / base[name] for name in told]


def gradients(model, loss):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss(model).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("multiple", [1, 1.5])
@pytest.mark.parametrize("build", [gpt, cnn])
def test_gradient_errors_stay_within_the_multiple(build, multiple):
    """On one batch: the median parameter's within the multiple, and any one's within one and a half times that."""
    ratios = gradient_ratios(build, multiple)
    assert len(ratios) >= 10
    assert statistics.median(ratios) <= multiple
    assert max(ratios) <= 1.5 * multiple


def test_control_without_a_budget_gradients_are_less_exact():
    assert statistics.median(gradient_ratios(gpt, 1000)) > 1.1
    assert statistics.median(gradient_ratios(gpt, 0.5)) < 0.95


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "compile", ["eager", *(pytest.param(c, marks=pytest.mark.slow) for c in ("aot_eager", "inductor"))]
)
def test_a_sample_says_what_rules_can_only_estimate(compile):
    model, loss = gpt()
    amp_graph.convert(model, "bf16,accuracy=1.2", sample=loss, compile=compile)
    loss(model).backward()
    (graph,) = amp_graph.report(model).graphs
    assert graph.budget.origin == "measured"
    assert 0 < graph.budget.error <= 1.2
    assert at_work(gpt, "bf16,accuracy=1.2")[2].budget.origin == "by rule"


def test_the_report_shows_the_budget():
    model, _, graph = at_work(gpt, "bf16,accuracy=1.2")
    text = amp_graph.report(model).text()
    assert "accuracy   1.2: the fastest plan whose predicted error is at most 1.2 times" in text
    assert f"error budget 1.2: predicted error of the outputs {graph.budget.error:.3f} (by rule, no bound)" in text
    told = amp_graph.report(model).to_dict()["graphs"][0]["budget"]
    assert told["multiple"] == 1.2
    assert told["picoseconds"] <= told["of_autocast"]
    assert at_work(gpt, "bf16")[2].budget is None


def test_what_its_owner_wants_low_is_said_where_no_plan_is_as_exact():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    amp_graph.precision("low")(model[0])
    amp_graph.convert(model, "bf16,accuracy=0.01")
    model(torch.randn(64, 64)).sum().backward()
    assert "no plan is that exact" in " ".join(amp_graph.report(model).text().split())


@forward_of(nn.Linear)
def MeanSquare(self, x):
    return nn.Linear.forward(self, x).square().mean()


# The loss of an autoencoder is small beside its outputs: the direction of its gradient says 0.3, and 0.8 is measured.
LONG = (pytest.param(name, 1.3, marks=pytest.mark.slow) for name in ("vit", "module_repeated", "conv3d"))
# A region of autocast inside of a model is low whatever the plan is: it was not counted, and 0 was predicted.
PREDICTED = (("autoencoder", 1.3), ("interpolate", 1.3), ("autocast_enabled_inside", 1.0), *LONG)


@pytest.fixture
def _every_call_pays(monkeypatch):
    tiny = replace(machine("cpu_amx"), call=1e-12)
    monkeypatch.setattr("amp_graph.passes.precision.plan_precision.machine_for", lambda device: tiny)


@pytest.mark.usefixtures("_every_call_pays")
@pytest.mark.parametrize(("name", "multiple"), PREDICTED)
def test_a_measured_prediction_is_within_two_of_the_outputs_error(name, multiple):
    predicted, error = predicted_and_measured(name, multiple)
    assert 0 < predicted < multiple
    assert predicted / 2 <= error <= predicted * 2


@pytest.mark.usefixtures("_every_call_pays")
def test_control_the_direction_of_the_losss_gradient_predicts_another(monkeypatch):
    monkeypatch.setattr(sensitivity_sample, "spread", lambda grad: grad)
    predicted, error = predicted_and_measured("autoencoder", 1.3)
    assert error > 2 * predicted


@pytest.mark.usefixtures("_every_call_pays")
def test_a_result_of_one_number_has_no_bound():
    model, x = MeanSquare(64, 64), torch.randn(64, 64)
    amp_graph.convert(model, "bf16,accuracy=1.3", sample=lambda m: m(x))
    model(x).backward()
    report = amp_graph.report(model)
    assert report.graphs[0].budget.origin == ONE_NUMBER
    assert "no bound" in " ".join(report.text().split())


# -- the sample call ----------------------------------------------------------------------------------------


@layers(
    lambda: dict(
        body=nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    )
)
def Noisy(self, x):
    return self.body(x)


def sampled(model, x, policy="bf16,accuracy=1.5"):
    return amp_graph.convert(model, policy, sample=lambda m: m(x).square().mean())


def origin(model):
    return amp_graph.report(model).graphs[0].budget.origin


def test_a_sample_leaves_no_trace():
    model, x = Noisy(), torch.randn(32, 16)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads, random = [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    sampled(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert [p.requires_grad for p in model.parameters()] == [True] * len(grads)
    model(x).sum().backward()
    assert origin(model) == "measured"


@layers(lambda: dict(body=nn.Linear(16, 4)), ask=torch.compiler.disable(lambda self, x: x.requires_grad_()))
def AsksForGradients(self, x):
    """As wav2vec2 does, so that checkpointed layers get gradients."""
    return self.body(self.ask(x[:, None]))


@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_a_model_that_asks_for_gradients_itself_can_be_sampled():
    x = torch.randn(32, 16)
    model = sampled(AsksForGradients(), x)
    model(x).sum().backward()
    assert "measured" in {graph.budget.origin for graph in amp_graph.report(model).graphs if graph.budget}


def test_other_sizes_and_copies_keep_what_was_measured():
    model = sampled(Noisy(), torch.randn(32, 16))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one(torch.randn(8, 16))
        assert origin(one) == "measured"


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_levels_that_hold_low_parameters_are_sampled_before_they_do(level):
    model = sampled(Noisy(), torch.randn(32, 16), f"bf16-{level},accuracy=1.5")
    model(torch.randn(32, 16)).sum().backward()
    assert origin(model) == "measured"


def test_a_training_step_takes_a_budget():
    model, loss = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)), nn.MSELoss()
    step = amp_graph.TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1), "bf16,accuracy=1.5")
    x, y = torch.randn(64, 64), torch.zeros(64, 1)
    assert step(x, y) > step(x, y) > 0
    assert amp_graph.report(step).graphs[0].budget.multiple == 1.5


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (lambda m: m(torch.randn(4, 16)), r"a tensor of \[4, 4\], which is not a loss"),
        (lambda m: 1.0, "a float, which is not a loss"),
        (lambda m: m(torch.randn(4, 16)).sum().detach(), "which is not a loss"),
        (lambda m: torch.zeros((), requires_grad=True) * 2, "does not come from any captured graph"),
    ],
)
def test_a_sample_that_gives_no_loss_is_refused_and_the_model_stays_as_it_was(sample, told):
    model = Noisy()
    with pytest.raises(CaptureError, match=told) as error:
        amp_graph.convert(model, "bf16,accuracy=1.5", sample=sample)
    assert "fix:   sample=lambda model: loss_fn(model(x), y)" in str(error.value)
    assert "forward" not in model.__dict__
    amp_graph.convert(model, "bf16")


def test_errors_of_the_sample_itself_pass_through():
    with pytest.raises(ZeroDivisionError):
        amp_graph.convert(Noisy(), "bf16,accuracy=1.5", sample=lambda m: 1 / 0)


def test_a_sample_without_a_budget_is_refused():
    with pytest.raises(PolicyError, match="sample= is for an error budget, and accuracy=fast has none"):
        amp_graph.convert(Noisy(), "bf16,accuracy=fast", sample=lambda m: m(torch.randn(4, 16)).sum())


def test_a_sample_for_a_model_that_is_converted_already_is_refused():
    model = amp_graph.convert(Noisy(), "bf16,accuracy=1.5")
    assert amp_graph.convert(model, "bf16,accuracy=1.5") is model
    with pytest.raises(CaptureError, match="already converted"):
        amp_graph.convert(model, "bf16,accuracy=1.5", sample=lambda m: m(torch.randn(4, 16)).sum())

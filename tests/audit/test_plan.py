"""What amp_graph would do: the plan of a model without memory is that of the model, and nothing of it changes."""

import functools
import gc
import random
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_graph
from amp_graph.audit.records import NOWHERE, Region, Training
from amp_graph.audit.session import Audit
from amp_graph.audit.speed.model_sketch import call_of, sketch_of
from amp_graph.audit.speed.plan import _of_plans as lines_of_plans
from amp_graph.audit.speed.planned_call import Planned, planned
from amp_graph.errors import AmpGraphError
from amp_graph.passes.precision.machine_rates import MACHINES
from amp_graph.passes.torch_compat.fake import FakeTensor
from amp_graph.policy import Policy
from tests.audit.running import trained
from tests.layers import layers


class Attention(nn.Module):
    """Layers, a buffer, tied weights, a list of modules and what a forward writes to."""

    def __init__(self, width=64):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, width), nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = [nn.Linear(width, width), nn.Linear(width, width)]  # registered below, under another name
        self.parts = nn.ModuleList(self.blocks)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.calls, self.seen = 0, []

    def forward(self, tokens, targets=None, *, shift=True):
        self.calls += 1
        self.seen.append(tokens.shape)
        x = self.embed(tokens)
        q, k = (block(x) for block in self.blocks)
        x = x + F.scaled_dot_product_attention(q, k, self.norm(x)) * self.scale
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def networks():
    """Models with the arguments of a call."""
    tokens = torch.randint(40, (4, 16))
    images = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(2304, 10)
    )
    return {
        "attention": (Attention(), (tokens,), {"targets": tokens}),
        "convolutions": (convolutions.to(memory_format=torch.channels_last), (images,), {}),
        "recurrent": (nn.LSTM(16, 32, num_layers=2), (torch.randn(5, 4, 16),), {}),
        "transformer": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.randn(2, 9, 32),), {}),
    }


def bytes_of(model):
    return [(name, t.detach().clone().numpy().tobytes()) for name, t in model.state_dict().items()]


@pytest.mark.parametrize("name", ["attention", "convolutions", "recurrent", "transformer"])
@pytest.mark.parametrize("machine", ["cpu_amx", "cpu"])
def test_the_plan_is_that_of_a_conversion(name, machine, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / f"{machine}.toml"))
    model, args, kwargs = networks()[name]
    found = planned(sketch_of(model, call_of(args, kwargs)), Policy.parse("bf16"))
    amp_graph.convert(model, "bf16")(*args, **kwargs)
    graphs = amp_graph.report(model).graphs
    assert found.machine == graphs[0].predicted.machine == machine
    full = sum(one.predicted.full for one in graphs)
    assert found.full == pytest.approx(full, rel=1e-6)
    assert found.seconds == pytest.approx(sum(one.predicted.full / one.predicted.speed for one in graphs), rel=1e-6)
    assert found.autocast == pytest.approx(sum(one.predicted.full / one.predicted.autocast for one in graphs), rel=1e-6)
    assert found.casts > 0


def test_a_sketch_has_no_memory_and_changes_nothing():
    model, args, kwargs = networks()["attention"]
    before, states = bytes_of(model), (torch.get_rng_state().tolist(), random.getstate())
    sketch = sketch_of(model, call_of(args, kwargs))
    tensors = [*sketch.model.parameters(), *sketch.model.buffers(), *sketch.args, *sketch.kwargs.values()]
    assert len(tensors) == 11
    assert all(isinstance(t, FakeTensor) for t in tensors)
    assert sketch.model.head.weight is sketch.model.embed.weight  # ties stay, and parts are found by all their names
    assert sketch.model.blocks[0] is sketch.model.parts[0] is not model.parts[0]
    planned(sketch, Policy.parse("bf16"))
    assert bytes_of(model) == before
    assert (model.calls, model.seen) == (0, [])
    assert (torch.get_rng_state().tolist(), random.getstate()) == states


@pytest.mark.by_profit
def test_the_lines_of_a_training_and_the_one_to_type():
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    lines = trained(lambda: model(torch.randn(512, 512)).square().mean(), model.parameters()).report().plan
    assert len(lines) == 6
    assert lines[0] == "amp_graph.convert would run Sequential in bf16, planned for cpu_amx:"
    assert lines[1].startswith("casts in a forward: ")
    assert lines[1].endswith("; as it ran: 0, 0 MB")
    assert lines[2].startswith("predicted speed of the models' forward and backward: ")
    assert lines[4] == 'to have it: model = amp_graph.convert(model, "bf16")'
    assert lines[5].startswith("amp-graph cost model.py:build measures it: ")


@pytest.mark.by_profit
def test_where_low_precision_is_not_profitable_the_line_says_so(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / "cpu.toml"))
    model = nn.Linear(64, 64)
    audit = trained(lambda: model(torch.randn(8, 64)).square().mean(), model.parameters())
    assert audit.report().plan[4] == "keep float32 for these sizes on cpu"


def lines_under_autocast(models, x, dtype=torch.bfloat16):
    """Return the plan of a training of ``models``, each one called with what the one before returned."""

    def loss():
        with torch.autocast("cpu", dtype):
            y = functools.reduce(lambda y, model: model(y), models, x)
        return y.float().square().mean()

    return list(trained(loss, [p for model in models for p in model.parameters()]).report().plan)


@pytest.mark.by_profit
@pytest.mark.parametrize(
    ("machine", "dtype", "advice"),
    [
        ("cpu_amx", torch.bfloat16, "nothing is predicted to be gained over what runs"),
        ("cpu", torch.bfloat16, "keep float32 for these sizes on cpu, and turn torch.autocast off"),
        ("cpu", torch.float16, "keep float32 for these sizes on cpu, and turn torch.autocast off"),
        ("cpu_amx", torch.float16, r'in bf16 .* times float32\'s: model = amp_graph.convert(model, "bf16")'),
    ],
)
def test_under_autocast_the_advice_is_to_keep_it_to_turn_it_off_or_another_dtype(machine, dtype, advice, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / f"{machine}.toml"))
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    *_, said, measure = lines_under_autocast([model], torch.randn(512, 512), dtype)
    assert re.fullmatch(advice.replace("(", r"\(").replace(")", r"\)"), said)
    assert measure.startswith("amp-graph cost model.py:build measures it")


@pytest.mark.by_profit
@pytest.mark.parametrize(
    ("autocast", "seconds", "advice"),
    [
        (0.50, 0.40, "to have it: "),
        (0.50, 0.49, "nothing is predicted to be gained"),  # both are predicted, and not that well
        (0.50, 0.95, "nothing is predicted to be gained"),  # predictions know less of a plan's kernels
        (0.95, 1.10, "nothing is predicted to be gained"),
        (1.50, 1.10, "keep float32 for these sizes on cpu, and turn torch.autocast off"),
        (1.50, 0.90, "to have it: "),
    ],
)
def test_a_change_is_advised_where_it_is_predicted_to_gain_over_what_runs(autocast, seconds, advice):
    training = Training(regions=[Region(NOWHERE, "cpu", "bfloat16", enabled=True, outer=-1)])
    sketch = sketch_of(nn.Linear(4, 4), call_of((torch.ones(1, 4),), {}))
    found = Planned("cpu", seconds=seconds, autocast=autocast, full=1.0)
    assert list(lines_of_plans(found, [sketch], training, "bf16"))[-2].startswith(advice)


@pytest.mark.by_profit
def test_a_model_in_low_precision_is_not_told_to_keep_float32(monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_MACHINE", str(MACHINES / "cpu.toml"))
    model = nn.Linear(64, 64).bfloat16()
    audit = trained(lambda: model(torch.randn(8, 64).bfloat16()).float().square().mean(), model.parameters())
    assert audit.report().plan[4] == "nothing is predicted to be gained over what runs"


class Reads(nn.Linear):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x) * float(x.detach().float().numpy().sum())


@layers(lambda: dict(first=nn.Conv1d(64, 64, 1), second=nn.Conv1d(64, 64, 1)))
def Mixed(self, x):
    return self.second(self.first(x).bfloat16())


@pytest.mark.by_profit
def test_an_input_that_autocast_lowered_is_planned_as_outside_of_autocast():
    names = type("Names", (nn.Conv1d,), {})(64, 64, 1)
    lines = lines_under_autocast([nn.Conv1d(64, 64, 1), names], torch.randn(4, 64, 256))
    assert lines[0].startswith("amp_graph.convert would run Conv1d, Names in bf16")
    assert not [line for line in lines if "not planned" in line]


@pytest.mark.by_profit
@pytest.mark.parametrize(
    ("model", "x", "why"),
    [
        (Reads(8, 8), torch.randn(4, 8), r"not planned: Reads: .*test_plan\.py:\d+: .*numpy"),
        (
            Mixed(),
            torch.randn(4, 64, 8),
            r"not planned: Mixed: .*test_plan\.py:\d+: RuntimeError: Input type",
        ),
    ],
)
def test_where_a_part_is_not_planned_nothing_is_compared_and_the_reason_has_a_line(model, x, why):
    first = nn.Linear(8, 8) if x.dim() == 2 else nn.Conv1d(64, 64, 1)
    lines = lines_under_autocast([first, model], x)
    assert re.match(why, lines[0])
    assert not [line for line in lines if re.search("predicted speed|keep float32|to have it", line)]


def test_a_look_leaves_no_hook_behind_also_where_a_forward_raises():
    class Failing(nn.Linear):
        def forward(self, x):
            raise KeyError("as the user wrote it")

    model = Failing(4, 4)
    before = [len(dict_) for dict_ in vars(torch.nn.modules.module).values() if isinstance(dict_, dict)]
    with Audit(looks=(1,)) as audit, pytest.raises(KeyError, match="as the user wrote it"):
        model(torch.ones(1, 4))
    assert not model._forward_hooks
    assert not model._forward_hooks_with_kwargs
    assert before == [len(dict_) for dict_ in vars(torch.nn.modules.module).values() if isinstance(dict_, dict)]
    assert audit.report().plan[0] == "not planned: no call of a model recorded gradients"


def test_the_plan_of_a_model_that_is_gone():
    def train(model):
        return trained(lambda: model(torch.randn(64, 512)).square().mean(), model.parameters())

    audit = train(nn.Linear(512, 512))
    gc.collect()
    assert not audit.training.models
    assert audit.report().plan[0] == "amp_graph.convert would run Linear in bf16, planned for cpu_amx:"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_model_is_audited_and_not_planned():
    model = torch.jit.script(nn.Linear(4, 4))
    lines = trained(lambda: model(torch.randn(2, 4)).mean(), model.parameters()).report().plan
    assert lines[0].startswith("not planned: ")
    assert lines[-1].startswith("to see it: amp-graph plan")


def test_the_record_of_a_call_keeps_no_argument_alive():
    class Batch:
        def __init__(self):
            self.tensor = torch.ones(1)

    given = [torch.ones(1), Batch(), {"a": (torch.ones(1), Listed(x=torch.ones(1)))}]
    gone = [weakref.ref(one) for one in (given[0], given[1], given[1].tensor, given[2]["a"][0], given[2]["a"][1]["x"])]
    call = call_of(given, {})
    del given
    assert [ref() for ref in gone] == [None] * 5
    assert len(call.args) == 3


class Listed(dict):
    """Arguments in a class that no tree of tensors goes through."""


@pytest.mark.parametrize(
    ("made", "steps", "why"),
    [
        (lambda model: amp_graph.convert(model, "bf16"), 3, "Sequential is converted already"),
        (lambda model: nn.Sequential(amp_graph.convert(model, "bf16")), 3, "Sequential is converted already"),
        (lambda model: torch.compile(model, backend="aot_eager"), 3, "Sequential is compiled"),
        (lambda model: nn.Sequential(torch.compile(model, backend="aot_eager")), 3, "Sequential is compiled"),
        (lambda model: model, 1, "the training ended before a step was looked at"),
        (lambda model: nn.Sequential(model, nn.Flatten(0)).requires_grad_(False), 3, "no call of a model recorded"),
    ],
)
def test_a_training_without_a_plan_says_why(made, steps, why):
    model, bias = made(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), nn.Parameter(torch.ones(1))
    audit = trained(lambda: (model(torch.randn(4, 8)).mean() * bias).sum(), [*model.parameters(), bias], steps)
    assert audit.report().plan[0].startswith(f"not planned: {why}")


@pytest.mark.parametrize("is_decorated", [False, True], ids=["plain", "decorated"])  # as those of transformers are
def test_a_model_of_accelerate_is_planned_by_the_forward_of_its_class(is_decorated, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    model, args, kwargs = networks()["attention"]
    if is_decorated:
        forward = type(model).forward
        monkeypatch.setattr(type(model), "forward", functools.wraps(forward)(lambda *a, **k: forward(*a, **k)))
    plain = planned(sketch_of(model, call_of(args, kwargs)), Policy.parse("bf16"))
    try:
        prepared = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    assert "forward" in vars(prepared)
    sketch = sketch_of(prepared, call_of(args, kwargs))
    assert planned(sketch, Policy.parse("bf16")) == plain
    assert not [name for name, value in vars(sketch.model).items() if getattr(value, "__self__", None) is prepared]
    prepared.forward = replaced().forward  # by another, since
    with pytest.raises(AmpGraphError, match="the forward of Attention was replaced"):
        sketch_of(prepared, call_of(args, kwargs))


def replaced():
    model = nn.Linear(4, 4)
    model.forward = model.forward
    return model


def compiled():
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("model", "args", "why"),
    [
        (replaced, (torch.ones(1, 4),), "the forward of Linear was replaced"),
        (compiled, (torch.ones(1, 4),), "Linear is compiled"),
        (lambda: nn.Linear(4, 4), (Listed(x=1),), "Linear is called with a Listed"),
        (lambda: nn.Linear(4, 4), (torch.ones(1, 4).to_sparse(),), "Linear is called with a Tensor"),
    ],
)
def test_what_cannot_be_planned_says_why(model, args, why):
    with pytest.raises(AmpGraphError, match=why):
        sketch_of(model(), call_of(args, {}))

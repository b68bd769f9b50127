"""Steps whose batches differ in sizes and numbers: two are traced, one forward serves the others, or none is captured.

Every run is compared with a step that is traced anew for each kind of batch, which is how all steps were.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from amp_graph.scaling.loss_scale import LossScale
from tests.layers import forward_of, layers
from tests.warned import heard, without_warnings

STEPS = 5


@layers(lambda: dict(a=nn.Linear(16, 32), norm=nn.BatchNorm1d(32), b=nn.Linear(32, 4), unused=nn.Linear(2, 2), calls=0))
def Net(self, x):
    return self.b(F.gelu(self.norm(self.a(x))))


@forward_of(Net)
def Counting(self, x):
    self.calls += 1
    return Net.forward(self, x) * min(1.0, self.calls / 5)


@forward_of(Net)
def Times(self, x, times, factor=1.0):
    """Takes as many turns as it is told, and another layer along from the fourth on."""
    h = self.a(x) * factor
    for _ in range(times):
        h = self.norm(F.gelu(h))
    return self.b(h) + (self.unused(h[:, :2]).sum() if times > 3 else 0.0)


def lengths(micro_batches=1):
    drawn = torch.Generator().manual_seed(1)
    sizes = [micro_batches * (n + 3) for n in range(STEPS)]
    return [(torch.randn(n, 16, generator=drawn), torch.randn(n, 4, generator=drawn)) for n in sizes]


def turns():
    x, y = lengths()[-1]
    return [((x, n), y) for n in range(STEPS)]


def factors():
    x, y = lengths()[-1]
    return [((x, 1, 0.9**n), y) for n in range(STEPS)]


def trained(kind, batches, policy, optimizer, traced, **options):
    """Return (model, optimizer, step, losses, warnings); ``traced``: each kind of batch is traced whole."""
    torch.manual_seed(0)
    model = kind()
    made = optimizer(model.parameters(), lr=1e-2)
    if "fp16" in policy:
        options["loss_scale"] = LossScale(2.0**8)
    step = amp_graph.TrainStep(model, F.mse_loss, made, policy, **options)
    if traced:
        step._runs.alone = False
        step._runs.capture()
    with heard() as seen:
        losses = [step(*batch).item() for batch in batches]
    return model, made, step, losses, [str(one.message) for one in seen if one.category is AmpGraphWarning]


def compare(kind, batches, policy="bf16", optimizer=torch.optim.AdamW, **options):
    """Train both ways, and return the step that learns and its warnings; the trained models are alike."""
    model, made, step, losses, warned = trained(kind, batches, policy, optimizer, False, **options)
    options.pop("max_graphs", None)
    wanted, theirs, other, expected, _ = trained(kind, batches, policy, optimizer, True, **options)
    assert len(other.captured) == STEPS
    assert losses == pytest.approx(expected, rel=0.02)
    for (name, p), q in zip(model.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert (p - q).float().norm() <= 0.03 * q.float().norm() + 1e-3, name
    assert set(made.state) == {
        p for p, q in zip(model.parameters(), wanted.parameters(), strict=True) if q in theirs.state
    }
    assert step.skipped_steps == other.skipped_steps
    assert step.state_dict() == other.state_dict()
    assert all(p.grad is None for p in model.parameters())
    return step, warned


@pytest.mark.parametrize(
    ("policy", "optimizer", "options"),
    [
        ("fp16", torch.optim.AdamW, {"clip_norm": 0.5}),
        ("bf16", torch.optim.AdamW, {"micro_batches": 2}),
        pytest.param("bf16", torch.optim.SGD, {}, marks=pytest.mark.slow),
        pytest.param("bf16-O2", torch.optim.AdamW, {}, marks=pytest.mark.slow),
        pytest.param("fp16", torch.optim.RMSprop, {}, marks=pytest.mark.slow),
    ],
)
def test_a_forward_is_captured_for_all_lengths(policy, optimizer, options):
    step, warned = compare(Net, lengths(options.get("micro_batches", 1)), policy, optimizer, **options)
    assert len(step.captured) == 2
    assert len(amp_graph.report(step).graphs) <= 4
    assert not warned


@pytest.mark.parametrize(
    ("kind", "batches"), [(Times, factors()), pytest.param(Counting, [lengths()[-1]] * STEPS, marks=pytest.mark.slow)]
)
def test_a_number_that_changes_becomes_a_symbol(kind, batches):
    step, warned = compare(kind, batches)
    assert len(amp_graph.report(step).graphs) <= 6
    assert not warned


@pytest.mark.parametrize(
    ("policy", "optimizer", "options"),
    [
        ("fp16", torch.optim.Adam, {}),
        pytest.param("bf16-O2", torch.optim.SGD, {}, marks=pytest.mark.slow),
        pytest.param("bf16", torch.optim.AdamW, {"clip_value": 0.1}, marks=pytest.mark.slow),
        pytest.param("fp16", torch.optim.RMSprop, {}, marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_captured_for_all_runs_as_convert_runs_it(policy, optimizer, options):
    step, (warned,) = compare(Times, turns(), policy, optimizer, max_graphs=3, **options)
    assert len(step.captured) == 2
    assert re.search(r"captured 1 times.*torch.autocast(?s:.*)differ in", warned)
    assert any("captured 1 times" in note for note in amp_graph.report(step).notes)


def test_a_size_that_the_user_marks_is_in_no_traced_step():
    model = Net()
    step = amp_graph.TrainStep(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), "bf16")
    model.eval()
    for x, y in lengths():
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(y, 0)
        with without_warnings():
            assert step(x, y).item() == pytest.approx(F.mse_loss(model(x), y).item(), rel=0.02)
    assert not step.captured


@pytest.mark.parametrize("max_graphs", [1, 3])
def test_a_bad_step_changes_nothing(max_graphs):
    model = Times()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = amp_graph.TrainStep(
        model, F.mse_loss, optimizer, "fp16", max_graphs=max_graphs, loss_scale=LossScale(2.0**8)
    )
    batches = turns()
    with without_warnings():
        for batch in batches[:3]:
            step(*batch)
        before = copy.deepcopy([*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())])
        (x, n), y = batches[3]
        step((x, n), y + torch.inf)
    after = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
    assert all(map(torch.equal, before, after))
    assert step.skipped_steps == 1
    assert step.loss_scale.values()[0] == 2.0**7


def test_outputs_are_returned_as_they_are_by_traced_steps():
    model = Times()
    step = amp_graph.TrainStep(
        model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), max_graphs=3, outputs=True
    )
    with without_warnings():
        for batch in turns():
            loss, out = step(*batch)
            assert loss.dtype == out.dtype == torch.float32
            assert not loss.requires_grad
            assert not out.requires_grad
            assert loss.item() == pytest.approx(F.mse_loss(out, batch[1]).item(), rel=0.02)


def test_what_is_no_loss_is_refused_where_nothing_is_captured():
    model = Times()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = amp_graph.TrainStep(model, lambda out, y: out if len(out) == 3 else out.mean(), optimizer, max_graphs=1)
    x, y = lengths()[-1]
    step((x, 1), y)
    with pytest.raises(CaptureError, match="the loss is"):
        step((x[:3], 2), y)

"""Weights that are tied or untied between two steps: one tensor is then several inputs of a captured graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.scaling.loss_scale import STUCK
from amp_graph.step import trace_step
from tests.layers import forward_of, layers
from tests.step.test_step_follows import LEVELS, batch, compare, loop, sgd, stepped
from tests.step.test_step_follows import decayed as adamw
from tests.step.test_train_step import parameters, same


@layers(
    lambda: dict(a=nn.Linear(8, 8), b=(b := nn.Linear(8, 8)), head=nn.Linear(8, 4), own=(b.weight,)), seed=0
)  # what is in a tuple is no parameter while it is not tied
def Layers(self, x):
    """Two layers that may share their weight."""
    return self.head(F.relu(self.b(F.relu(self.a(x)))))


@layers(
    lambda: dict(a=nn.Embedding(16, 8), b=(b := nn.Linear(8, 16, bias=False)), head=nn.Linear(16, 4), own=(b.weight,)),
    seed=0,
)
def Table(self, x):
    """A table that is read by row and multiplied by, of which only the product is in low precision."""
    return self.head(F.relu(self.b(self.a(x.abs().mul(6).long().clamp(max=15)).mean(1))))


def tie(model, optimizer):
    """As `model.tie_weights()` does; the optimizer has the shared one alone."""
    model.b.weight = model.a.weight
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [p for p in params if p is not model.own[0]]
    optimizer.state.pop(model.own[0], None)


def untie(model, optimizer):
    model.b.weight = model.own[0]
    optimizer.param_groups[0]["params"].append(model.own[0])


def tied_at(*steps):
    """Tie before the first of these steps, untie before the next, and so on."""

    def before(i, model, optimizer):
        if i in steps:
            (untie if steps.index(i) % 2 else tie)(model, optimizer)

    return before


@pytest.mark.sampled(8)
@pytest.mark.parametrize("policy", LEVELS[:2])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make", [sgd, adamw, lambda p: torch.optim.RMSprop(p, lr=0.01)])
@pytest.mark.parametrize("kind", [Layers, Table])
def test_tied_later(kind, make, clip, parts, policy):
    compare(kind, make, policy, tied_at(2), parts=parts, clip=clip)


@pytest.mark.parametrize("kind", [Layers, Table])
def test_tied_later_at_o2(kind):
    compare(kind, sgd, "bf16-O2", tied_at(2))


@pytest.mark.parametrize("kind", [Layers, Table])
def test_tied_later_at_o2_in_micro_batches(kind):
    """Added up in fp32, where the loop adds up in bf16: another factor of a gradient would be far more than that."""
    one, two, start = kind(), kind(), kind()
    loop(one, sgd(one.parameters()), 4, "bf16-O2", tied_at(2), parts=2)
    stepped(two, sgd(two.parameters()), 4, "bf16-O2", tied_at(2), micro_batches=2)
    theirs, ours = one.state_dict(), two.state_dict()
    for name, before in start.state_dict().items():
        if name != "b.weight":
            moved = (theirs[name] - before).norm()
            assert moved > 0
            assert (ours[name] - theirs[name]).norm() < 0.02 * moved


@pytest.mark.parametrize("policy", LEVELS)
def test_tied_and_untied_by_turns(policy):
    compare(Layers, sgd, policy, tied_at(1, 3, 5, 6), steps=8)


@pytest.mark.parametrize("policy", LEVELS)
def test_tied_without_a_word_to_the_optimizer(policy):
    """The weight that nobody uses any more stays where it is."""

    def before(i, model, optimizer):
        if i == 2:
            model.b.weight = model.a.weight

    one, *_ = compare(Layers, adamw, policy, before)
    assert one.own[0] is not one.a.weight


def test_tied_where_neither_gets_a_gradient():
    @forward_of(Layers)
    def Aside(self, x):
        with torch.no_grad():
            aside = self.b(self.a(x))
        return self.head(x + aside)

    compare(Aside, adamw, "bf16", tied_at(2))


def test_infinite_gradients_of_a_tied_weight_change_nothing_and_are_named():
    model = Layers()
    optimizer = adamw(model.parameters())
    scale = amp_graph.LossScale(8.0, floor=8.0)
    step = amp_graph.TrainStep(model, F.cross_entropy, optimizer, "fp16", loss_scale=scale)
    step(*batch())
    tie(model, optimizer)
    x, y = batch()
    step(x, y)
    before = [p.detach().clone() for p in model.parameters()]
    x[0, 0] = float("inf")
    bad = [(x, y)] * 2 * STUCK
    with pytest.warns(AmpGraphWarning, match="in a row at the smallest scale"):
        [step(*one) for one in bad]
    assert same(before, parameters(model))
    assert step.skipped_steps == 2 * STUCK


def test_control_inputs_taken_for_as_many_tensors(monkeypatch):
    def all_of(self, args, without):
        owned = self.watched.owned()
        return [i for i, a in enumerate(args) if id(a) in owned and i not in without]

    monkeypatch.setattr(trace_step.StepBuilder, "_trained", all_of)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        compare(Layers, sgd, "bf16-O0", tied_at(2), parts=2)

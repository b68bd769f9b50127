"""Whose copies an update makes old: those of all that is trained; frozen weights and teachers keep theirs."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.passes import kept_copy, weight_copies, weight_updates
from tests.measure import CastCounter
from tests.test_weight_copies import OPTIMIZERS, X, assert_equal_output, assert_equal_step, pair, weight_casts

WIDE = 64


class Adapted(nn.Module):
    """A frozen linear, and a low-rank one beside it that is trained (LoRA)."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(16, WIDE)
        self.twice = nn.Linear(WIDE, WIDE)
        for p in self.parameters():
            p.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDE, 4, bias=False), nn.Linear(4, WIDE, bias=False)

    def forward(self, x):
        x = torch.relu(self.frozen(x))
        return self.twice(x) + self.up(self.down(x))


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_weights_are_cast_once_for_all(name):
    ours, theirs = pair(Adapted)
    optimizers = [OPTIMIZERS[name](trained(model)) for model in (ours, theirs)]
    counts = []
    for _ in range(4):
        assert_equal_step(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(weight_casts(ours))
    assert counts == [2] * 4, "those that are trained"
    assert weight_casts(theirs) == 6


def test_an_optimizer_may_have_what_is_frozen():
    """Of all parameters, as many loops make it: what it finds without a gradient is as it was."""
    ours, _ = pair(Adapted)
    optimizer = torch.optim.AdamW(ours.parameters(), 0.01, fused=True)
    for _ in range(2):
        ours(X).square().mean().backward()
        optimizer.step()
    assert weight_casts(ours) == 2


def test_a_teacher_is_cast_once_for_all():
    """It might train, and no optimizer has it."""
    student, _ = pair()
    teacher, _ = pair()
    optimizer = torch.optim.AdamW(student.parameters(), 0.01, fused=True)
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(X)
        (student(X) - wanted).square().mean().backward()
        optimizer.step()
    assert weight_casts(teacher) == 0


def alternate(turns, ours, theirs, step=lambda optimizer: optimizer.step()):
    """Train two models in turns, each frozen while the other trains, as adversaries are: outputs are equal throughout.

    Fused updates leave version counters alone.
    """
    sides = [[(m, torch.optim.AdamW(m.parameters(), 0.01, fused=True)) for m in side] for side in (ours, theirs)]
    for turn in turns:
        for side in sides:
            for i, (model, _) in enumerate(side):
                model.requires_grad_(i == turn)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal_output(one, other)
        for side in sides:
            model, optimizer = side[turn]
            model(X).square().mean().backward()
            step(optimizer)
            optimizer.zero_grad()


def adversaries():
    (one, its), (other, others) = pair(), pair()
    return (one, other), (its, others)


TURNS = (0, 1, 0, 0, 1, 1, 0)


def test_what_was_trained_is_old_behind_each_step():
    alternate(TURNS, *adversaries())


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_what_a_compiled_optimizer_updates_is_old_too():
    """Dynamo traces the hook: nobody hears which parameters the optimizer has."""
    alternate(TURNS[:4], *adversaries(), lambda optimizer: torch.compile(optimizer.step, backend="eager")())


@pytest.mark.parametrize("blind", ["words", "marks", "both"])
def test_control_either_finds_it_and_neither_does_not(blind, monkeypatch):
    """Without the note of what was trained, and without the words, these very turns see old weights."""
    if blind != "words":
        monkeypatch.setattr(kept_copy, "outlives", lambda weight, mark, now: True)
    if blind != "marks":
        monkeypatch.setattr(weight_copies, "words_of", lambda weight: memoryview(b""))
    with pytest.raises(AssertionError) if blind == "both" else contextlib.nullcontext():
        alternate(TURNS, *adversaries())


def test_a_step_graph_of_another_model_makes_none_of_them_old():
    """A TrainStep's update is of its optimizer's parameters; what it froze keeps the copies that it has."""
    frozen, _ = pair(Adapted)
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW(trained(model), 0.01, fused=True)
    step = amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, "bf16")
    frozen(X)
    for _ in range(3):
        step(X)
    assert weight_casts(frozen) == 0
    with CastCounter(model) as casts:
        step(X)
    assert {cast.shape for cast in casts.of("forward", "weight")} == {(4, WIDE), (WIDE, 4)}


def test_control_a_few_elements_of_data_are_not_seen():
    """Nothing looks at all of a frozen weight; where it trained, whatever follows a step is seen."""
    ours, theirs = pair(Adapted)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.01)
    assert_equal_output(ours, theirs)
    for model in (ours, theirs):
        model.twice.weight.data[1, 1] = 7.0
    other.step()
    with torch.no_grad():
        assert not torch.equal(ours(X), theirs(X)), "found by itself: say so in the documentation"
    assert amp_graph.drop_weight_copies(ours) > 0
    assert_equal_output(ours, theirs)


def test_those_that_are_gone_are_forgotten():
    known = weight_updates.Trained()
    kept = [torch.ones(1) for _ in range(10)]
    for _ in range(3):
        known.add([*kept, *(torch.ones(1) for _ in range(weight_updates.MANY))])
    assert len(known._known) < 2 * weight_updates.MANY
    assert all(p in known for p in kept)
    assert torch.ones(1) not in known


def averaged(into, of):
    """An exponential average, as many libraries write it: no counter shows it."""
    for p, q in zip(into.parameters(), of.parameters(), strict=True):
        p.data.mul_(0.9).add_(q.data, alpha=0.1)


def test_an_average_kept_through_data_is_seen():
    ours, theirs = pair(), pair()  # each a model that trains and its average
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01, fused=True) for m, _ in (ours, theirs)]
    for model in (ours[1], theirs[1]):
        model.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for (model, average), optimizer in zip((ours, theirs), optimizers, strict=True):
                (model(X) - average(X)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged(average, model)
            for i in (0, 1):
                assert_equal_output(ours[i], theirs[i])

"""Whose copies an update makes old: those of what it wrote, and no others."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.weights import memory_access_hooks, update_tracking, watched_memory
from tests.measure import CastCounter
from tests.passes.weights.test_cast_cache import (
    OPTIMIZERS,
    X,
    assert_equal_output,
    assert_equal_step,
    pair,
    weight_casts,
)

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


def trains(ours, theirs, kind, steps=3):
    """Train both on; return how many weights the first one's forwards cast behind each step."""
    optimizers = [kind(trained(model)) for model in (ours, theirs)]
    counts = []
    for _ in range(steps):
        assert_equal_step(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(weight_casts(ours))
    return counts


def somebody_steps():
    torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.01).step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_weights_are_cast_once(name):
    ours, theirs = pair(Adapted)
    assert trains(ours, theirs, OPTIMIZERS[name]) == [2, 2, 2], "2 are trained"
    assert weight_casts(theirs) == 6
    with torch.no_grad():
        for model in (ours, theirs):
            model.twice.weight[1, 1] = 7.0  # moves its counter
    assert weight_casts(ours) == 1
    assert_equal_output(ours, theirs)


def test_an_optimizer_may_have_what_is_frozen():
    """Of all parameters, as many loops make it: what it finds without a gradient is as it was."""
    ours, theirs = pair(Adapted)
    every = {id(model.down.weight): model for model in (ours, theirs)}
    kind = lambda params: torch.optim.AdamW(every[id(params[0])].parameters(), 0.01, fused=True)  # noqa: E731
    assert trains(ours, theirs, kind)[-1] == 2


def test_what_is_frozen_for_good_is_cast_no_more():
    ours, theirs = pair(Adapted)
    for model in (ours, theirs):
        model.twice.requires_grad_(True)
    assert trains(ours, theirs, OPTIMIZERS["adamw fused"]) == [4, 4, 4]
    for model in (ours, theirs):
        model.twice.requires_grad_(False)
        model.zero_grad()
    assert trains(ours, theirs, OPTIMIZERS["adamw fused"]) == [2, 2, 2]


def test_a_model_that_only_infers_is_cast_once():
    ours, theirs = pair(Adapted)
    other, _ = pair(Adapted)
    assert weight_casts(other) == 6
    trains(ours, theirs, OPTIMIZERS["adamw fused"])
    assert weight_casts(other) == 0


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


def rows(model, i):
    """Some of a frozen weight's columns, as an average by ``lerp_`` of one whose gradients are sparse changes them."""
    model.twice.weight.data[:, 5:7] += 0.25 * (1 + i)


@pytest.mark.parametrize("first", [0, 3])
def test_a_write_to_some_columns_of_a_frozen_weight_is_seen(first):
    """A module that is trained, and its average, as one model."""
    ours, theirs = pair(Adapted)
    assert_equal_output(ours, theirs)
    for i in range(5):
        trains(ours, theirs, OPTIMIZERS["adamw fused"], 1)
        if i >= first:
            for model in (ours, theirs):
                rows(model, i)
            somebody_steps()
            assert_equal_output(ours, theirs)
            assert weight_casts(ours) == 0


@pytest.mark.parametrize("deaf", ["steps", "kernels", "both"])
def test_control_either_shows_an_update_and_neither_does_not(deaf, monkeypatch):
    """Without the note of who stepped, and of which fused kernel ran, the turns of adversaries see old weights."""
    for module, who in ((update_tracking, "steps"), (memory_access_hooks, "kernels")):
        if deaf in (who, "both"):
            monkeypatch.setattr(module, "were_written", lambda tensors: None)
    with pytest.raises(AssertionError) if deaf == "both" else contextlib.nullcontext():
        alternate(TURNS, *adversaries())


def test_a_step_graph_casts_no_frozen_weight():
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW(trained(model), 0.01, fused=True)
    step = amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, "bf16")
    for _ in range(3):
        step(X)
    with CastCounter(model) as casts:
        step(X)
    assert {cast.shape for cast in casts.of("forward", "weight")} == {(4, WIDE), (WIDE, 4)}


def test_those_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(watched_memory, "WATCHED", {})
    monkeypatch.setattr(watched_memory, "_room", 0)
    monkeypatch.setattr(watched_memory, "MANY", 8)
    kept = [torch.ones(1) for _ in range(10)]
    known = {id(watched_memory.watch_of(t)) for t in kept}
    for _ in range(100):
        watched_memory.watch_of(torch.ones(1))
    assert len(watched_memory.WATCHED) <= 21
    assert {id(watched_memory.watch_of(t)) for t in kept} == known


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
        warnings.simplefilter("error", AmpGraphWarning)
        for _ in range(3):
            for (model, average), optimizer in zip((ours, theirs), optimizers, strict=True):
                (model(X) - average(X)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                averaged(average, model)
            for i in (0, 1):
                assert_equal_output(ours[i], theirs[i])

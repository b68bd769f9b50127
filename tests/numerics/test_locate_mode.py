"""A locator names the cause of a skipped step, from the step itself, and leaves the training as it is."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from tests.layers import forward_of, layers
from tests.numerics.overflows import made

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def step_of(name, kind, **options):
    model, batch = made(name, kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return amp_graph.TrainStep(model, cross_entropy, optimizer, "fp16", **options), batch


def fix_of(locator):
    """The policy that is suggested; a name in it may have a dot, a dash or a plus."""
    (fix,) = (fix for fix in locator.results[0].fix if "with it, loss and gradients are finite" in fix)
    return fix.split("'")[1]


@pytest.mark.parametrize("name", ["a", "a-b", "a+b", "0"])
def test_the_fix_for_a_loop_of_the_users_was_tried(name):
    inner = torch.nn.ModuleDict({name: Loud()})
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(Called(inner, name)), torch.nn.Linear(8, 4))
    batch = torch.ones(3, 8), torch.zeros(3, dtype=torch.long)

    def watched(policy):
        converted, scaler = amp_graph.convert(copy.deepcopy(model), policy), amp_graph.GradScaler(init_scale=8.0)
        locator = amp_graph.Locator(converted, scaler)
        loop(converted, torch.optim.SGD(converted.parameters(), 1e-6), scaler, batch)
        return locator

    with pytest.warns(AmpGraphWarning, match="step 1 was skipped"):
        found = watched("fp16")
    assert watched(fix_of(found)).skips == 0


@forward_of(torch.nn.Module)
def Loud(self, x):
    return x * 6e4 * 6e4 / 6e4 / 6e4


@layers(lambda inner, name: dict(inner=inner, name=name))
def Called(self, x):
    return self.inner[self.name](x)


def test_a_skipped_step_is_located_and_changes_nothing():
    step, batch = step_of("cnn", "big")
    locator = amp_graph.Locator(step)
    before = copy.deepcopy(dict(step.model.named_parameters()))
    with pytest.warns(AmpGraphWarning, match="step 1 was skipped: overflow in forward"):
        step(*batch)
    (found,) = locator.results
    assert "# planted" in found.line
    assert found.scale == 2.0**16
    assert all(torch.equal(p, before[name]) for name, p in step.model.named_parameters())
    for _ in range(4):
        step(*batch)
    assert len(locator.results) == 1
    assert (locator.skips, locator.replays) == (5, 3)
    policy = fix_of(locator)
    again = amp_graph.TrainStep(step.model, cross_entropy, step.optimizer, policy)
    again(*batch)
    assert int(again.skipped_steps) == 0
    causes = [row["cause"] for row in amp_graph.scale_history(step).rows]
    assert causes[:3] == [found.cause] * 3
    assert causes[3:] == ["not located: 3 skipped steps were"] * 2


def test_training_with_a_locator_is_bit_for_bit_training_without():
    ran = []
    for watched in (False, True):
        step, batch = step_of("mlp", "", loss_scale=amp_graph.LossScale(2.0**20))
        locator = amp_graph.Locator(step) if watched else None
        torch.manual_seed(1)
        losses = [step(*batch) for _ in range(14)]
        ran.append((losses, [p.detach().clone() for p in step.model.parameters()], torch.get_rng_state()))
        if locator is not None:
            assert locator.results
            assert locator.results[0].fix[0].startswith("a loss scale of at most")
            assert 0 < int(step.skipped_steps) < 14
    assert all(torch.equal(a, b) for a, b in zip(*(torch.utils._pytree.tree_leaves(r) for r in ran), strict=True))


def test_micro_batches_are_run_again_part_by_part():
    step, (x, y) = step_of("mlp", "", micro_batches=2)
    x, y = torch.cat([x[:4], x[:4]]), torch.cat([y[:4], y[:4]])
    step(x, y)
    locator = amp_graph.Locator(step)
    x[6, 2] = float("nan")  # in the second part
    with pytest.warns(AmpGraphWarning, match=r"input batch\[0\] is not finite"):
        step(x, y)
    assert locator.results[0].kind == "given"


def test_the_batch_is_not_kept_alive_on_the_cpu():
    step, (x, y) = step_of("mlp", "")
    amp_graph.Locator(step)
    step(x, y)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_copies_of_a_step_are_not_watched_and_a_detached_one_neither():
    step, batch = step_of("mlp", "big")
    locator = amp_graph.Locator(step)
    copied = copy.deepcopy(step)
    copied(*batch)
    locator.detach()
    step(*batch)
    assert locator.skips == 0
    assert not locator.results


# -- a loop of the user's -------------------------------------------------------------------------------------


def loop(model, optimizer, scaler, batch, parts=1):
    optimizer.zero_grad()
    for _ in range(parts):
        scaler.scale(cross_entropy(model(batch[0]), batch[1]) / parts).backward()
    scaler.step(optimizer)
    scaler.update()


def watched(name="mlp", kind="", scale=8.0):
    """A converted model, its optimizer, scaler and locator, and a batch."""
    model, batch = made(name, kind)
    model, scaler = amp_graph.convert(model, "fp16"), amp_graph.GradScaler(init_scale=scale)
    return model, torch.optim.SGD(model.parameters(), 0.01), scaler, amp_graph.Locator(model, scaler), batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "kind", "direction"), [("mlp", "big", "forward"), ("gpt", "loud", "backward")])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop_is_watched_by_the_gradients_of_its_outputs(name, kind, direction, parts):
    model, optimizer, scaler, locator, batch = watched(name, kind, 2.0**14)
    with pytest.warns(AmpGraphWarning, match="step 1 was skipped"):
        loop(model, optimizer, scaler, batch, parts)
    (found,) = locator.results
    assert "# planted" in found.line, found.text()
    assert found.direction == direction
    assert found.scale == 2.0**14
    assert amp_graph.scale_history(scaler).rows[0]["cause"] == found.cause
    locator.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_of_many_calls_in_a_step_the_last_eight_are_looked_at():
    model, optimizer, scaler, locator, (x, y) = watched()
    for bad in (0, 1):
        optimizer.zero_grad()
        for number in range(9):
            scaler.scale(cross_entropy(model(x * float("inf") if number == bad else x), y)).backward()
        scaler.step(optimizer)
        with nullcontext() if bad == 0 else pytest.warns(AmpGraphWarning, match="step 2 was skipped"):
            scaler.update()
    (found,) = locator.results
    assert found.given.startswith("input batch"), found.text()
    first, second = amp_graph.scale_history(scaler)
    assert first["cause"].startswith("not located: all was finite when it was run again")
    assert second["cause"] == found.cause


def test_a_loss_outside_of_the_model_is_told_by_the_gradient_that_it_gives():
    model, optimizer, scaler, locator, (x, _) = watched(scale=2.0**16)
    loss = (model(x) * float("inf")).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    with pytest.warns(AmpGraphWarning, match="the gradient of an output of the model is not finite"):
        scaler.update()
    assert locator.results[0].given == "the gradient of an output of the model"


def test_good_steps_are_not_run_again():
    model, optimizer, scaler, locator, batch = watched()
    for _ in range(3):
        loop(model, optimizer, scaler, batch)
    with torch.no_grad():
        model(batch[0])
    assert (locator.skips, locator.replays, locator.results) == (0, 0, [])
    assert str(locator).startswith("locator: 0 skipped steps")


def test_what_cannot_be_watched_is_refused_with_a_fix():
    model, _ = made("mlp", "")
    step = amp_graph.TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.01), "bf16")
    for given, told in (
        ((step,), "TrainStep without a loss scale"),
        ((model,), "without a GradScaler"),
        ((3,), "a int without"),
    ):
        with pytest.raises(CaptureError, match=told) as raised:
            amp_graph.Locator(*given)
        assert "fix:" in str(raised.value)
    with pytest.raises(CaptureError, match="limit=0"):
        amp_graph.Locator(model, amp_graph.GradScaler(), limit=0)

"""``MixedPrecisionOptimizer``: apex's interface, the same bits as convert with a scaler, clear errors."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import ScaleError
from amp_graph.optim.master_weights import full_value, master_of
from amp_graph.scaling.loss_scale import LossScale
from tests.capture.test_levels import equal, saved, train
from tests.step.test_train_step import Net, batches, build, by_hand, parameters, same

KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]


def run(model, optimizer, given, clip=None, dtype=None):
    for x, y in given:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x.to(dtype or x.dtype)).float(), y))
        if clip:
            optimizer.clip_master_grads(clip)
        optimizer.step()
    return model


def converted(policy="fp16-O2", kind=torch.optim.AdamW, seed=0, loss_scale="dynamic", **options):
    model, inside = build(optimizer=kind, seed=seed, **options)
    amp_graph.convert(model, policy)
    return model, amp_graph.MixedPrecisionOptimizer(inside, loss_scale=loss_scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_same_bits_as_a_converted_model_with_a_scaler(kind, clip):
    model, optimizer = converted(kind=kind)
    run(model, optimizer, batches(30), clip)
    other, theirs = build(optimizer=kind)
    scaler = amp_graph.GradScaler("cpu")
    by_hand(other, theirs, "fp16-O1", batches(30), scaler=scaler, clip=clip)
    assert equal(saved(model), saved(other))
    assert optimizer.loss_scale == scaler.get_scale()


def test_a_model_cast_by_hand_gets_masters():
    """What apex's users have: model.half(), and FP16_Optimizer around the optimizer."""
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 3)).bfloat16()
    optimizer = amp_graph.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    masters = optimizer.state_dict()["masters"]
    assert {p.dtype for p in masters} == {torch.float32}
    before = [m.clone() for m in masters]
    run(model, optimizer, batches(5), dtype=torch.bfloat16)
    assert not any(torch.equal(a, b) for a, b in zip(before, masters, strict=True))
    assert same([m.bfloat16() for m in masters], parameters(model))


@pytest.mark.parametrize(
    ("options", "scale", "dynamic"),
    [
        ({}, 1.0, False),
        ({"static_loss_scale": 128.0}, 128.0, False),
        ({"dynamic_loss_scale": True}, 2.0**16, True),
        ({"loss_scale": 0}, 2.0**16, True),
        ({"dynamic_loss_scale": True, "verbose": False}, 2.0**16, True),
        ({"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}}, 2.0**10, True),
        ({"loss_scale": 64}, 64.0, False),
        ({"loss_scale": torch.tensor(4.0)}, 4.0, False),
        ({"loss_scale": LossScale(256.0, hysteresis=2)}, 256.0, True),
    ],
)
def test_options_as_in_apex(options, scale, dynamic):
    optimizer = amp_graph.MixedPrecisionOptimizer(build()[1], **options)
    assert (optimizer.loss_scale, optimizer.scaler._loss_scale.dynamic) == (scale, dynamic)


def test_gradients_of_several_losses_add_up():
    model, optimizer = converted(loss_scale=8.0)
    (x, y), (u, v) = batches(2)
    optimizer.zero_grad()
    optimizer.backward(F.cross_entropy(model(x), y), update_master_grads=False)
    optimizer.backward(F.cross_entropy(model(u), v))
    wanted = [p.grad.float() / 8.0 for p in model.parameters()]
    optimizer.update_master_grads()
    assert same([p.grad for p in model.parameters()], wanted)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_infinite_gradient_changes_nothing_and_lowers_the_scale(fused, value):
    model, optimizer = converted(fused=fused)
    run(model, optimizer, batches(3))
    before = copy.deepcopy((parameters(model), saved(model), optimizer.state_dict()["optimizer"]["state"]))
    scale = optimizer.loss_scale
    for x, y in batches(1):
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y))
        model.first.weight.grad[0, 0] = value
        optimizer.step()
    assert optimizer.overflow
    assert optimizer.loss_scale == scale / 2
    assert optimizer.skipped_steps == 1
    assert same(before[0], parameters(model))
    assert equal(before[1], saved(model))
    now = optimizer.state_dict()["optimizer"]["state"]
    assert all(torch.equal(before[2][i][name], now[i][name]) for i in now for name in now[i])


@pytest.mark.parametrize("policy", ["fp16-O1", "fp16-O2", "bf16-O2"])
def test_25_steps_saved_and_25_more_are_50(policy):
    given = list(batches(50))
    whole, theirs = converted(policy)
    run(whole, theirs, given)
    model, optimizer = converted(policy)
    run(model, optimizer, given[:25])
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    states = torch.load(file)
    model, optimizer = converted(policy, seed=9)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    run(model, optimizer, given[25:])
    assert equal(saved(whole), saved(model))
    assert optimizer.loss_scale == theirs.loss_scale


def test_masters_alone_restore_the_model():
    model, optimizer = converted()
    run(model, optimizer, batches(5))
    other, theirs = converted(seed=9)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name in ("first.weight", "first.bias", "second.weight", "second.bias"):
        assert torch.equal(saved(model)[name], saved(other)[name])


def test_it_goes_on_with_a_model_that_was_reverted():
    model, inner = build()
    amp_graph.convert(model, "bf16-O2")
    low = [p for p in model.parameters() if p.dtype is torch.bfloat16]
    optimizer = amp_graph.MixedPrecisionOptimizer(inner)
    for i, (x, y) in enumerate(batches(6)):
        if i == 3:
            amp_graph.revert(model)
        before = parameters(model)
        run(model, optimizer, [(x, y)])
        assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    masters = optimizer.state_dict()["masters"]
    assert all(torch.equal(p, full) for p, full in zip(low, masters, strict=True))


def test_schedulers_take_it():
    model, optimizer = converted()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(model, optimizer, batches(1))
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.005


def test_an_optimizer_with_state_keeps_it_in_fp32():
    model, inside = build()
    train(model, inside, batches(3))
    amp_graph.convert(model, "bf16-O2")
    wanted = copy.deepcopy(inside.state_dict()["state"])
    optimizer = amp_graph.MixedPrecisionOptimizer(inside)
    now = optimizer.state_dict()["optimizer"]["state"]
    assert all(torch.equal(wanted[i][name], now[i][name]) for i in wanted for name in wanted[i])


def test_groups_added_later_get_masters():
    _, inside = build(optimizer=torch.optim.SGD)
    other = amp_graph.convert(Net(), "bf16-O2")
    optimizer = amp_graph.MixedPrecisionOptimizer(inside)
    optimizer.add_param_group({"params": list(other.parameters()), "lr": 0.5})
    assert {m.dtype for m in optimizer.state_dict()["masters"]} == {torch.float32}
    assert master_of(other.first.weight) is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["fp16-O2", "fp16-O1", None])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copied_together_both_train_on(copied, order, policy):
    """And others of this class are untouched: a copy of an optimizer patches the class of what it takes for one."""

    def made():
        if policy is not None:
            return converted(policy)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 3)).bfloat16()
        return model, amp_graph.MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    go = partial(run, dtype=torch.bfloat16 if policy is None else None)
    given = list(batches(6))
    model, optimizer = made()
    torch.optim.lr_scheduler.StepLR(optimizer, 100)  # which puts a step of its own there
    go(model, optimizer, given[:3])
    if order == "model first":
        twin, theirs = copied((model, optimizer))
    else:
        theirs, twin = copied((optimizer, model))
    go(model, optimizer, given[3:])
    assert not same(parameters(model), parameters(twin))
    go(twin, theirs, given[3:])
    assert same(parameters(model), parameters(twin))
    assert equal(saved(model), saved(twin))
    assert same(optimizer.state_dict()["masters"], theirs.state_dict()["masters"])
    go(*made(), given)


WRITES = {
    "filled": torch.no_grad()(lambda model: model.first.weight.fill_(0.5)),
    "replaced": lambda model: setattr(model.first.weight, "data", torch.full_like(model.first.weight, 0.5)),
    "loaded": lambda model: model.load_state_dict({**model.state_dict(), "first.weight": torch.full((24, 6), 0.5)}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["fp16-O2", "fp16-O1", None])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_written_into_weights_counts(late, write, policy):
    """Between two steps, and between clipping and the step; master and weight go on from it."""
    model = Net().half() if policy is None else amp_graph.convert(Net(), policy)
    optimizer = amp_graph.MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    for i, (x, y) in enumerate(batches(3)):
        if i == 2 and not late:
            write(model)
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x.half() if policy is None else x).float(), y))
        optimizer.clip_master_grads(1.0)
        if i == 2 and late:
            write(model)
        optimizer.step()
    moved = (model.first.weight.detach().float() - 0.5).abs().max()
    assert moved < 2e-3
    full = full_value(model.first.weight)
    assert 0 < (full.detach() - 0.5).abs().max() < 1.1e-3
    assert torch.equal(full.detach().to(model.first.weight.dtype), model.first.weight.detach())


def test_dynamic_loss_args_are_those_of_apex():
    given = {"init_scale": 2.0**8, "scale_factor": 4.0, "scale_window": 100}
    optimizer = amp_graph.MixedPrecisionOptimizer(build()[1], dynamic_loss_scale=True, dynamic_loss_args=given)
    scale = optimizer.scaler._loss_scale
    assert (scale.init_scale, scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (256, 4, 0.25, 100)


def test_hooks_are_those_of_the_optimizer_inside():
    model, optimizer = converted()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    run(model, optimizer, batches(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "saved", "loaded"]
    handle.remove()
    run(model, optimizer, batches(1))
    assert calls[4:] == ["before"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model, optimizer, x: optimizer.step(), "no gradients since the last step"),
        (lambda model, optimizer, x: optimizer.step(lambda: None), "no gradients since the last step"),
        (lambda model, optimizer, x: optimizer.backward(model(x)), r"the loss is a tensor of shape \(8, 3\)"),
        (lambda model, optimizer, x: optimizer.backward(3.0), "the loss is a float"),
        (lambda *given: amp_graph.MixedPrecisionOptimizer(given[0]), "expected an optimizer, got a Net"),
        (lambda *given: amp_graph.MixedPrecisionOptimizer(given[1]), "got a MixedPrecisionOptimizer"),
        *(
            (
                lambda *_, given=given: amp_graph.MixedPrecisionOptimizer(build()[1], **given),
                "MixedPrecisionOptimizer: ",
            )
            for given in (
                *({"loss_scale": -1}, {"loss_scale": True}, {"static_loss_scale": "dynamic?"}),
                *({"dynamic_loss_scale": "x"}, {"loss_scale": "often"}),
                *({"dynamic_loss_scale": True, "dynamic_loss_args": given} for given in (3, {"window": 1})),
            )
        ),
    ],
)
def test_bad_input(call, told):
    model, optimizer = converted()
    before = saved(model)
    with pytest.raises(ScaleError, match=rf"{told}(?s:.*)(fix|legal):"):
        call(model, optimizer, next(batches(1))[0])
    assert equal(before, saved(model))


def test_bad_norms_and_states_and_a_loss_that_comes_too_late():
    model, optimizer = converted()
    (x, y), *_ = batches(1)
    optimizer.backward(F.cross_entropy(model(x), y))
    for wrong in (-1.0, 0, float("nan"), "1"):
        with pytest.raises(ScaleError, match=f"max_norm={wrong!r}"):
            optimizer.clip_master_grads(wrong)
    optimizer.clip_master_grads(1.0)
    with pytest.raises(ScaleError, match="after the gradients were unscaled"):
        optimizer.backward(F.cross_entropy(model(x), y))
    before, whole = saved(model), optimizer.state_dict()
    entries = ({"masters": None}, {"masters": [1, 2]}, {"optimizer": None}, {"optimizer": {}}, {"loss_scale": None})
    told = [(state, "over the same model") for state in ({}, {**whole, "masters": [torch.ones(3)]})]
    told += [
        (state, r"MixedPrecisionOptimizer: (?s:.*)fix:") for state in (None, 5, *({**whole, **e} for e in entries))
    ]
    told.append(({**whole, "loss_scale": {**whole["loss_scale"], "scale": float("nan")}}, "nan"))
    for state, match in told:
        with pytest.raises(ScaleError, match=match):
            optimizer.load_state_dict(state)
    assert equal(before, saved(model))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("policy", ["bf16-O2", "fp16-O2"])
def test_a_closure_is_called_once_and_steps_as_without_one(policy, kind):
    found = []
    for closed in (False, True):
        torch.manual_seed(0)
        model = amp_graph.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)), policy)
        optimizer = amp_graph.MixedPrecisionOptimizer(kind(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        calls = []

        def closure(model=model, optimizer=optimizer, calls=calls):
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = model(torch.ones(3, 8)).square().mean()
            optimizer.backward(loss)
            optimizer.clip_master_grads(0.5)
            return loss

        for _ in range(3):
            loss = closure() if not closed else None
            loss = optimizer.step(closure) if closed else (optimizer.step(), loss)[1]
        assert calls == [True] * 3
        found.append((loss.item(), {n: v.clone() for n, v in model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])

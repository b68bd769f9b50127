"""The scaler: torch's trajectories, DeepSpeed's and Megatron's sequences, and steps that change nothing."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState

import amp_graph
from amp_graph.errors import AmpGraphWarning, ScaleError
from amp_graph.scaling.loss_scale import LossScale
from tests.by_hand import descend
from tests.measure_dtypes import HostCopies
from tests.step.test_train_step import everything

INF, NAN = float("inf"), float("nan")
BAD = [INF, -INF, NAN]


def moved(scale, pattern):
    """The scale after each step of `pattern` (True: finite)."""
    scale.to(torch.device("cpu"))
    found = []
    for finite in pattern:
        scale.update(torch.tensor(0.0 if finite else 1.0))
        found.append(scale.values()[0])
    return found


def torchs(pattern, **options):
    scaler = torch.amp.GradScaler("cpu", **options)
    scaler.scale(torch.ones(()))
    found = []
    for finite in pattern:
        torch._amp_update_scale_(
            scaler._scale,
            scaler._growth_tracker,
            torch.tensor(0.0 if finite else 1.0),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )
        found.append(scaler.get_scale())
    return found


# -- trajectories -------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("options", [{}, {"growth_interval": 7}, {"growth_factor": 1.5, "backoff_factor": 0.75}])
def test_5000_steps_as_torch(share, options):
    generator = torch.Generator().manual_seed(int(share * 1000))
    pattern = (torch.rand(5000, generator=generator) < share).tolist()
    options = {"growth_interval": 20, **options}
    theirs = torchs(pattern, **options)
    ours = moved(LossScale(**options, floor=1e-38, ceiling=3e38), pattern)
    assert ours[:200] == theirs[:200]
    alive = next((i for i, s in enumerate(theirs) if not 1e-37 < s < 1e38), len(theirs))
    assert ours[:alive] == theirs[:alive]


def megatron(pattern, scale, interval, hysteresis, floor):
    """Megatron-LM's DynamicGradScaler.update, as documented."""
    found, good, left = [], 0, hysteresis
    for finite in pattern:
        if not finite:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, floor)
        else:
            good += 1
            if good == interval:
                good, left, scale = 0, hysteresis, scale * 2
        found.append(scale)
    return found


def deepspeed(pattern, scale, interval, hysteresis, floor):
    """DeepSpeed's DynamicLossScaler.update_scale, with consecutive_hysteresis off."""
    found, left, last = [], hysteresis, -1
    for i, finite in enumerate(pattern):
        if not finite:
            if hysteresis == 1 or left == 1:
                scale = max(scale / 2, floor)
            else:
                left -= 1
            last = i
        elif (i - last) % interval == 0:
            left, scale = hysteresis, scale * 2
        found.append(scale)
    return found


SEQUENCES = {
    "no overflow": [True] * 40,
    "all overflow": [False] * 40,
    "some overflow": [i % 7 != 3 for i in range(60)],
    "pairs": [i % 11 not in (4, 5) for i in range(80)],
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("rule", [megatron, deepspeed])
def test_documented_sequences(name, hysteresis, rule):
    pattern = SEQUENCES[name]
    ours = moved(LossScale(2.0**8, growth_interval=5, hysteresis=hysteresis, floor=1.0), pattern)
    assert ours == rule(pattern, 2.0**8, 5, hysteresis, 1.0)


def test_control_another_hysteresis_is_another_sequence():
    pattern = SEQUENCES["pairs"]
    ours = moved(LossScale(2.0**8, growth_interval=5, hysteresis=1, floor=1.0), pattern)
    assert ours != megatron(pattern, 2.0**8, 5, 2, 1.0)


@pytest.mark.parametrize(("finite", "limit"), [(False, 2.0**-3), (True, 2.0**18)])
def test_limits_are_reached_and_never_passed(finite, limit):
    scale = LossScale(floor=2.0**-3, ceiling=2.0**18, growth_interval=1)
    found = moved(scale, [finite] * 300)
    assert found[-1] == limit
    assert all(2.0**-3 <= s <= 2.0**18 for s in found)


# -- one step -----------------------------------------------------------------------------------------


def make(optimizer, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, optimizer(model.parameters(), lr=0.1, **options)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "sgd fused": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
    "adam": (torch.optim.Adam, {}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def finish(scaler, optimizer):
    scaler.step(optimizer)
    scaler.update()


def one_step(model, optimizer, scaler, harm=lambda: None):
    """Train a step of ones; ``harm`` is called between backward and step."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    harm()
    finish(scaler, optimizer)


def train(model, optimizer, scaler, steps=3, unscale=False):
    for i in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 24).view(4, 6) * (i + 1)
        scaler.scale(model(x).pow(2).mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        finish(scaler, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscale", [False, True])
def test_the_same_parameters_as_with_torchs_scaler(name, unscale):
    kind, options = OPTIMIZERS[name]
    ours, theirs = make(kind, **options), make(kind, **options)
    train(*ours, amp_graph.GradScaler("cpu", init_scale=2.0**10), unscale=unscale)
    train(*theirs, torch.amp.GradScaler("cpu", init_scale=2.0**10), unscale=unscale)
    for a, b in zip(everything(*ours), everything(*theirs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_an_infinite_gradient_changes_nothing(name):
    kind, options = OPTIMIZERS[name]
    model, optimizer = make(kind, **options)
    scaler = amp_graph.GradScaler("cpu", init_scale=2.0**10)
    train(model, optimizer, scaler)
    before, scale = everything(model, optimizer), scaler.get_scale()
    cases = itertools.product(list(model.parameters()), [0, 1, -1], BAD)
    for count, (parameter, place, value) in enumerate(cases, 1):
        one_step(model, optimizer, scaler, lambda: parameter.grad.view(-1)[place].fill_(value))  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))
        assert scaler.skipped_steps.item() == count
        assert scaler.found_inf > 0
        scale = max(scale / 2, 2.0**-14)
        assert scaler.get_scale() == scale
    train(model, optimizer, scaler, steps=1)
    assert scaler.found_inf == 0
    assert any(not torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))


def test_skipped_steps_is_one_tensor_from_the_first_loss_on():
    """A log keeps the tensor, and reads it later; restored, the count is there before the first loss."""
    model, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "_skipped": 3})
    before = scaler.skipped_steps
    scaler.scale(torch.ones(()))
    held = scaler.skipped_steps
    for tensor in (before, held):
        assert (tensor.shape, tensor.dtype, tensor.item()) == ((), torch.int32, 3)
    scaler.scale(model(torch.ones(2, 6)).sum() * INF).backward()
    finish(scaler, optimizer)
    assert held.item() == scaler.skipped_steps.item() == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_first_step_leaves_no_trace(name):
    kind, options = OPTIMIZERS[name]
    ours, never = make(kind, **options), make(kind, **options)
    scaler = amp_graph.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(ours[0](torch.ones(2, 6)).sum()).backward()
    ours[0][0].weight.grad[0, 0] = NAN
    scaler.step(ours[1])
    scaler.update(2.0**10)
    train(*ours, scaler)
    train(*never, amp_graph.GradScaler("cpu", init_scale=2.0**10))
    assert all(torch.equal(a, b) for a, b in zip(everything(*ours), everything(*never), strict=True))


class Around(torch.optim.Optimizer):
    """An optimizer that hands the step on to another, with the other's groups or equal ones of its own."""

    def __init__(self, params, inner, shared):
        super().__init__(params, {})
        self.inner = inner
        if shared:
            self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2", "fp16-O2"])
def test_an_optimizer_around_another_steps_on_unscaled_gradients(policy, shared, unscale):
    found = []
    for around in (False, True):
        model, optimizer = make(torch.optim.SGD)
        amp_graph.convert(model, policy)
        outer = Around(model.parameters(), optimizer, shared) if around else optimizer
        train(model, outer, amp_graph.GradScaler("cpu", init_scale=2.0**6), unscale=unscale)
        found.append(list(model.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_losses_and_two_optimizers():
    first, one = make(torch.optim.SGD)
    second, two = make(torch.optim.Adam)
    scaler, x = amp_graph.GradScaler("cpu"), torch.ones(2, 6)
    losses = [first(x).sum(), second(first(x).repeat(1, 2)).sum()]
    for loss in scaler.scale(losses):
        loss.backward(retain_graph=True)
    second[0].weight.grad[0, 0] = NAN
    before = everything(first, one), everything(second, two)
    scaler.step(one)
    finish(scaler, two)
    assert any(not torch.equal(a, b) for a, b in zip(everything(first, one), before[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(everything(second, two), before[1], strict=True))
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_complex_gradients(bad):
    """torch's scaler raises."""
    parameter = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    scaler = amp_graph.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale((parameter.abs() ** 2).sum()).backward()
    if bad is not None:
        torch.view_as_real(parameter.grad)[1, bad] = INF
    finish(scaler, optimizer)
    expected = torch.tensor([1 + 2j, 3 - 4j]) * (0.5 if bad is None else 1)
    assert torch.allclose(parameter, expected)
    assert scaler.get_scale() == (2.0**8 if bad is None else 2.0**7)


def test_a_step_without_gradients_is_legal():
    model, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    before = everything(model, optimizer)
    finish(scaler, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), before, strict=True))
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision(dtype):
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = amp_graph.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale((parameter * torch.tensor([1.0, 2.0, 0.5], dtype=dtype)).float().sum()).backward()
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [1.0, 2.0, 0.5]


def test_sparse_gradients():
    embedding = nn.Embedding(6, 3, sparse=True)
    optimizer, scaler = torch.optim.SparseAdam(embedding.parameters()), amp_graph.GradScaler("cpu")
    before = embedding.weight.detach().clone()
    for value in (INF, 1.0):
        descend(optimizer, (embedding(torch.tensor([1, 1, 4])) * value).sum(), scaler)
        assert torch.equal(embedding.weight, before) == (value == INF)


# -- saving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(amp_graph.GradScaler, torch.amp.GradScaler)] * 2)
@pytest.mark.parametrize("turned", [False, True])
def test_states_load_into_each_other(source, target, turned):
    source, target = (target, source) if turned else (source, target)
    one, two = source("cpu", growth_interval=3), target("cpu")
    for scaler in (one, two):
        scaler.scale(torch.ones(()))
    one.update(float(2**9))
    two.load_state_dict(one.state_dict())
    assert two.get_scale() == 2.0**9
    assert two.get_growth_interval() == 3
    assert isinstance(amp_graph.GradScaler("cpu"), torch.amp.GradScaler)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_continues_where_it_was(copied):
    model, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu", growth_interval=2, hysteresis=2)
    train(model, optimizer, scaler, steps=5)
    twin = copied(scaler)
    assert twin.state_dict() == scaler.state_dict()
    train(model, optimizer, twin, steps=1)
    assert twin.get_scale() == 2 * scaler.get_scale()


@pytest.mark.parametrize(
    "broken",
    [
        *({"scale": value} for value in (NAN, 0.0, -1.0, INF, "much", None)),
        *({"_skipped": -1}, {"growth_interval": 0}, {"_growth_tracker": 0.5}),
        *({"backoff_factor": 2.0}, {"floor": "low"}, {"ceiling": 2.0**-20}),
        *({"_growth_tracker": NAN}, {"_growth_tracker": -5}, {"_hysteresis_left": -1}, {"_skipped": None}),
        *({"scale": 1e39}, {"growth_interval": 2.5}, {"hysteresis": 2**40}),
    ],
)
def test_a_broken_state_is_refused_by_name_and_changes_nothing(broken):
    scaler = amp_graph.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    good = scaler.state_dict()
    (name, value), *_ = broken.items()
    with pytest.raises(ScaleError, match=re.escape(f"the state has {name}={value!r}") + "(?s:.*)legal:(?s:.*)fix:"):
        scaler.load_state_dict({**good, **broken})
    assert scaler.state_dict() == good


@pytest.mark.parametrize("given", [None, 5, [1.0]])
def test_a_state_that_is_none_is_refused(given):
    with pytest.raises(ScaleError, match=r"expected a state dict, got (?s:.*)fix:"):
        amp_graph.GradScaler("cpu").load_state_dict(given)


def test_options_that_are_set_later_are_checked_too():
    scaler = amp_graph.GradScaler("cpu")
    scaler.set_growth_interval(5.0)
    assert scaler.state_dict()["growth_interval"] == 5
    for change, value in ((scaler.set_growth_interval, 2.5), (scaler.set_backoff_factor, 2.0)):
        with pytest.raises(ScaleError, match="legal:"):
            change(value)
    assert (scaler.get_growth_interval(), scaler.get_backoff_factor()) == (5, 0.5)


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"init_scale": 2.0**40}, {"enabled": "false"}, {"at_floor": "shout"}])
def test_options_that_make_no_sense(options):
    with pytest.raises(ScaleError, match=rf"{next(iter(options))}(?s:.*)legal:"):
        amp_graph.GradScaler("cpu", **options)


@pytest.mark.parametrize("wrong", [None, [1], nn.Linear(2, 2)])
def test_what_is_no_optimizer_is_refused(wrong):
    scaler = amp_graph.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ScaleError, match=r"expected an optimizer, got (?s:.*)fix:"):
            call(wrong)


def test_calls_out_of_order():
    model, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu")
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ScaleError, match="nothing was scaled yet"):
            call(optimizer)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    with pytest.raises(ScaleError, match="no optimizer was unscaled or stepped"):
        scaler.update()
    with pytest.raises(ScaleError, match="closure"):
        scaler.step(optimizer, lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(ScaleError, match="already called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(ScaleError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(ScaleError, match="already called"):
        scaler.step(optimizer)
    with pytest.raises(ScaleError, match="inside of an iteration"):
        pickle.dumps(scaler)


@pytest.mark.parametrize("kind", [amp_graph.GradScaler, torch.amp.GradScaler])
def test_what_others_read_of_an_optimizers_state(kind):
    """Trainers look into torch's scaler for the verdict of one optimizer; it is the same here."""
    model, optimizer = make(torch.optim.SGD)
    scaler = kind("cpu", init_scale=4.0)
    for bad in (False, True):
        scaler.scale(model(torch.full((2, 6), float("inf") if bad else 1.0)).sum()).backward()
        stages = [scaler._per_optimizer_states[id(optimizer)]["stage"]]
        assert not scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        looked = scaler._check_inf_per_device(optimizer)
        assert [v.item() for v in looked.values()] == [float(bad)]
        scaler.unscale_(optimizer)
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
        assert [v.item() for v in scaler._found_inf_per_device(optimizer).values()] == [float(bad)]
        scaler.step(optimizer)
        stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
        assert stages == [OptState.READY, OptState.UNSCALED, OptState.STEPPED]
        scaler.update()
        assert id(optimizer) not in scaler._per_optimizer_states


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("floor", value) for value in (-1.0, float("nan"), 2.0**40)],
        *[("ceiling", value) for value in (0.0, 2.0**-20)],
        *[("dynamic", value) for value in ("no", 1, None)],
        *[(name, 8.0) for name in ("nonsense", "init_scale")],
    ],
)
def test_a_change_that_makes_no_sense_is_refused(name, value):
    scale = amp_graph.LossScale(16.0)
    before = dict(vars(scale))
    with pytest.raises(ScaleError, match=r"loss scale: (.|\n)*legal:(.|\n)*fix:"):
        scale.change(name, value)
    assert vars(scale) == before


def test_looking_at_the_state_of_an_optimizer_is_no_verdict():
    _, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    with pytest.raises(ScaleError, match="no optimizer was unscaled or stepped"):
        scaler.update()
    pickle.loads(pickle.dumps(scaler))


def test_a_shorter_growth_interval_counts_at_once():
    """Where there were more good steps already, the next makes the scale grow; torch's never does again."""
    model, optimizer = make(torch.optim.SGD)
    scaler = amp_graph.GradScaler("cpu", init_scale=4.0)
    for i in range(7):
        if i == 5:
            scaler.set_growth_interval(3)
        one_step(model, optimizer, scaler)
        assert scaler.get_scale() == (4.0 if i < 5 else 8.0)


@pytest.mark.parametrize("at_floor", ["warn", "error"])
def test_infinite_gradients_at_the_floor_are_said_with_the_parameter(at_floor):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    scaler = amp_graph.GradScaler("cpu", init_scale=1.0, floor=1.0, at_floor=at_floor)

    def steps(count):
        for _ in range(count):
            one_step(model, optimizer, scaler, lambda: model[1].weight.grad[0, 0].fill_(NAN))

    steps(19)
    match = r"20 steps in a row at the smallest scale, 1; .* 1\.weight, of shape \(3, 5\)"
    with pytest.warns(AmpGraphWarning, match=match) if at_floor == "warn" else pytest.raises(ScaleError, match=match):
        steps(1)


def test_not_enabled_it_does_nothing():
    model, optimizer = make(torch.optim.SGD)
    scaler, x = amp_graph.GradScaler("cpu", enabled=False), torch.ones(2, 6)
    loss = model(x).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    finish(scaler, optimizer)
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


# -- operators ----------------------------------------------------------------------------------------


def test_the_operators_are_sound():
    from amp_graph.passes.loss_scaling import operators as scale_ops  # noqa: F401

    operators = torch.ops.amp_graph
    grads, state = [torch.ones(3), torch.ones(2).half()], [torch.tensor(8.0)]
    state += [torch.tensor(n, dtype=torch.int32) for n in (0, 2, 0, 0)]
    options = (torch.ones(()), 2.0, 0.5, 3, 2, 1.0, 2.0**24)
    check = torch.library.opcheck
    check(operators.check_finite_and_unscale_.default, (grads, torch.tensor(0.5), torch.zeros(())))
    check(operators.update_loss_scale_.default, (*state, *options))


def test_a_step_with_a_fused_optimizer_copies_nothing_to_the_host():
    def copies(optimizer, **options):
        model, optimizer = make(optimizer, **options)
        scaler = amp_graph.GradScaler("cpu")
        train(model, optimizer, scaler)
        scaler._floor.look = lambda *given: None  # free on the CPU, where it looks each time
        with HostCopies() as mode:
            train(model, optimizer, scaler, steps=1)
        return mode.found

    assert copies(torch.optim.AdamW, fused=True) == 0
    assert copies(torch.optim.RMSprop) > 0, "control: an optimizer that needs the verdict on the host"

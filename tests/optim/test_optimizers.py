"""``amp_graph.optim``: torch's updates bit for bit, and copies of converted models that no forward has to cast anew."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import CompilerError, ScaleError
from amp_graph.optim import optimizers as optim
from amp_graph.passes.weights import cast_cache, memory_access_hooks
from amp_graph.report import report_notes
from tests.measure import CastCounter
from tests.optim.test_native_update import RULES, folder  # noqa: F401 - compiles into a folder of the tests' own

INF = float("inf")
OURS = {torch.optim.SGD: optim.SGD, torch.optim.Adam: optim.Adam, torch.optim.AdamW: optim.AdamW}
OURS[torch.optim.Adagrad] = optim.Adagrad
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Linears, one of them large, a weight that two operations read, and a norm: all of sixteens of numbers."""

    def __init__(self, width=64, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.norm = nn.Linear(16, width), norm(width)
        self.large = nn.Linear(width, 2048)
        self.twice = nn.Parameter(torch.randn(2048, 16) / 64)
        self.unused = nn.Parameter(torch.ones(16))

    def forward(self, x):
        x = torch.tanh(self.large(F.gelu(self.norm(self.first(x)))))
        return F.linear(x @ self.twice, self.twice).tanh().mean(1, keepdim=True)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(optim, "one_pass_is_profitable", lambda device, elements: True)


def build(kind, policy="bf16", net=Net, **options):
    """The same model each time, and its optimizer; without a ``policy`` it is not converted."""
    torch.manual_seed(0)
    model = net()
    optimizer = kind(model.parameters(), **options)
    return (amp_graph.convert(model, policy, strict=True) if policy else model), optimizer


def backward(model, i=0):
    model(X + i).square().mean().backward()


def train(model, optimizer, steps=5):
    for i in range(steps):
        optimizer.zero_grad()
        backward(model, i)
        optimizer.step()


def everything(model, optimizer):
    state = [v for s in optimizer.state.values() for _, v in sorted(s.items()) if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def same(one, two):
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def on_the_same_gradients(ours, theirs, steps=4):
    """Step both models with the gradients of the first: what differs then is the update's doing."""
    (model, optimizer), (other, their) = ours, theirs
    for i in range(steps):
        optimizer.zero_grad()
        backward(model, i)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        their.step()


def stale(model):
    """The parameters of which a forward would read a copy that is not what they are now."""
    copies = conversion_of(model).copies
    return [n for n, p in model.named_parameters() if id(p) in copies._kept and not is_current(copies, p)]


def is_current(copies, p):
    return torch.equal(copies.read(p), p.detach().to(copies.dtype))


def weight_casts(model):
    with CastCounter(model) as casts:
        model(X)
    return len(casts.of("forward", "weight"))


# -- the update ---------------------------------------------------------------------------------------


# Without a loss scale fp16 leaves no gradient but that of one parameter, and says so: they are small in fp32, too.
@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:.*gradients are too small for fp16:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize("policy", ["", "bf16", "fp16"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.compiled
def test_bit_for_bit_torchs_fused_update(name, policy):
    kind, options = RULES[name]
    ours, theirs = build(OURS[kind], policy, **options), build(kind, "", fused=True, **options)
    on_the_same_gradients(ours, theirs)
    assert ours[1].how == "one pass"
    assert same(everything(*ours), everything(*theirs))
    assert not policy or not stale(ours[0])


def test_control_another_weight_decay_is_seen():
    ours, theirs = build(optim.AdamW), build(torch.optim.AdamW, "", fused=True, weight_decay=0.011)
    on_the_same_gradients(ours, theirs)
    assert not same(everything(*ours), everything(*theirs))


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
def test_no_forward_casts_a_weight_behind_it(kind):
    """Torch's is the control: behind its step all copies are old."""
    model, optimizer = build(kind, fused=True)
    train(model, optimizer, 3)
    assert weight_casts(model) == (0 if kind is optim.AdamW else 5)


@pytest.mark.compiled
def test_another_optimizers_step_makes_none_of_them_old():
    """As where a discriminator has one of torch's, whose step nobody can see."""
    model, optimizer = build(optim.AdamW)
    other, its = build(torch.optim.AdamW, fused=True)
    train(model, optimizer, 3)
    train(other, its, 1)
    assert weight_casts(model) == 0
    assert weight_casts(other) == 5


@pytest.mark.compiled
def test_what_is_trained_is_the_same_as_with_copies_cast_anew():
    """A training, against the same optimizer over a model that casts its weights at each call."""
    ours, theirs = build(optim.AdamW), build(optim.AdamW, "bf16")
    for each in (ours, theirs):
        train(*each, 6)
    assert [e[1].how for e in (ours, theirs)] == ["one pass"] * 2
    assert same(everything(*ours), everything(*theirs))


# -- what else writes, and who else reads ---------------------------------------------------------------


WRITES = {
    "in place": lambda p, m: p.mul_(1.5),
    "one element": lambda p, m: p.view(-1)[3].fill_(7.0),
    "other memory": lambda p, m: setattr(p, "data", p.detach() * 1.5),
    "all of data": lambda p, m: p.data.mul_(1.5),
    "some of data": lambda p, m: p.data.view(-1)[3].fill_(7.0),
    "some of an array": lambda p, m: p.detach().numpy().reshape(-1).__setitem__(3, 7.0),
}


@pytest.mark.parametrize("bad", [False, True], ids=["", "then a bad step"])
@pytest.mark.parametrize("write", WRITES)
def test_what_others_write_is_seen(write, bad):
    """Also where a step that changes nothing comes between: it must not call an old copy current."""
    model, optimizer = build(optim.AdamW)
    train(model, optimizer, 3)
    with torch.no_grad():
        for p in model.parameters():
            WRITES[write](p, model)
    if bad:
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        del optimizer.found_inf
    fresh = amp_graph.revert(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(model(X), amp_graph.convert(fresh, "bf16")(X))


@pytest.mark.compiled
def test_control_a_few_elements_of_data_are_not_seen_where_no_access_is(monkeypatch):
    model, optimizer = build(optim.AdamW)
    train(model, optimizer, 3)
    monkeypatch.setattr(memory_access_hooks, "handed_out", lambda tensor: None)
    model.large.weight.data.view(-1)[3] = 7.0
    assert stale(model) == ["large.weight"]


def test_hooks_behind_the_step_may_write_what_they_want():
    model, optimizer = build(optim.AdamW)
    train(model, optimizer, 2)
    hook = optimizer.register_step_post_hook(lambda o, *_: model.large.weight.data.view(-1)[3].fill_(7.0))
    train(model, optimizer, 1)
    assert not stale(model)
    hook.remove()


def test_a_graph_that_is_kept_has_the_weights_of_its_forward():
    """The copies that it saved are not written to."""
    model, optimizer = build(optim.SGD, net=lambda: Net(norm=nn.Identity), lr=0.5)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    wanted = model.first.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    assert torch.equal(model.first.weight.grad, wanted)
    assert not stale(model)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.compiled)], ids=["torch's kernels", "one pass"])
def kept_graph(request, monkeypatch):
    """A model, its optimizer, and a loss whose graph backward has kept."""
    monkeypatch.setattr(optim, "one_pass_is_profitable", lambda device, elements: request.param)
    model, optimizer = build(optim.SGD, lr=0.5)
    loss = model(X).square().mean()
    loss.backward(retain_graph=True)
    return model, optimizer, loss


def test_what_a_kept_graph_reads_in_fp32_is_an_error(kept_graph):
    """As behind torch's optimizers but for the fused ones, whose updates nothing shows."""
    _, optimizer, loss = kept_graph
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_bad_step_leaves_a_kept_graph_as_it_is(kept_graph):
    model, optimizer, loss = kept_graph
    wanted = model.first.weight.grad.clone()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()
    assert torch.equal(model.first.weight.grad, wanted)


@pytest.mark.compiled
def test_control_it_would_be_written_to(monkeypatch):
    monkeypatch.setattr(cast_cache, "is_nobody_elses", lambda kept: True)
    with pytest.raises(AssertionError):
        test_a_graph_that_is_kept_has_the_weights_of_its_forward()


# -- loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, INF])
@pytest.mark.parametrize("scaler", [amp_graph.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("steps", [2, 3], ids=["the bad step last", "a good one behind it"])
def test_with_a_scaler(scaler, bad, unscale, steps):
    """Parameters, state, the scale, and what the step leaves in gradients."""
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model, optimizer = build(kind, "", fused=True)
        scale = scaler("cpu", init_scale=2.0**10)
        for i in range(steps):
            optimizer.zero_grad()
            scale.scale(model(X + i).square().mean()).backward()
            if bad and i == 1:
                model.twice.grad[3, 3] = bad
            if unscale:
                scale.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scale.step(optimizer)
            scale.update()
        grads = [p.grad.nan_to_num(7.0) for p in model.parameters() if p.grad is not None]
        results.append([*everything(model, optimizer), *grads, torch.tensor(scale.get_scale())])
    assert same(*results)
    assert results[0][-1] == (2.0**9 if bad else 2.0**10)


def test_schedulers_and_closures():
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model, optimizer = build(kind, "", fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for i in range(4):
            optimizer.zero_grad()

            def closure(model=model, i=i):
                backward(model, i)
                return i

            assert optimizer.step(closure) == i
            schedule.step()
        results.append(everything(model, optimizer))
    assert same(*results)


def test_groups_that_change_on_the_way():
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        model = Net()
        optimizer = kind([{"params": model.first.parameters(), "lr": torch.tensor(0.1)}], fused=True)
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": [*model.large.parameters(), model.twice], "weight_decay": 0.0})
        train(model, optimizer, 2)
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        train(model, optimizer, 2)
        results.append(everything(model, optimizer))
    assert same(*results)


@pytest.mark.parametrize("there_and_back", [(optim.Adam, torch.optim.Adam), (torch.optim.Adam, optim.Adam)])
def test_either_loads_the_state_of_the_other(there_and_back):
    one, two = there_and_back
    plain, theirs = build(torch.optim.Adam, "", fused=True)
    train(plain, theirs, 4)
    model, optimizer = build(one, "")
    train(model, optimizer, 2)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    model.zero_grad()
    follower = two(model.parameters(), fused=True)
    follower.load_state_dict(torch.load(saved))
    if two is torch.optim.Adam:
        follower.param_groups[0]["fused"] = True
    for i in (2, 3):
        follower.zero_grad()
        backward(model, i)
        follower.step()
    # The first two steps of torch's kind without fused=True round otherwise.
    pairs = zip(everything(model, follower), everything(plain, theirs), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.compiled
def test_copies_train_on(how):
    model, optimizer = build(optim.AdamW)
    train(model, optimizer, 2)
    model.zero_grad()
    twin, its = how((model, optimizer))
    assert type(its) is optim.AdamW
    for each in ((model, optimizer), (twin, its)):
        train(*each, 2)
    assert its.how == "one pass"
    assert same(everything(model, optimizer), everything(twin, its))
    assert not stale(twin)


def test_over_masters():
    """At O2 the step is on fp32 masters, whoever makes it."""
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model, optimizer = build(kind, "bf16-O2", fused=True)
        train(model, optimizer, 4)
        results.append(everything(model, optimizer))
    assert same(*results)


@pytest.mark.compiled
def test_a_train_step_takes_it_for_torchs():
    results = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        model, optimizer = build(kind, "", fused=True)
        step = amp_graph.TrainStep(model, lambda out: out.square().mean(), optimizer, "bf16", update="one_pass")
        for i in range(3):
            step(X + i)
        results.append(everything(model, optimizer))
    assert same(*results)


OURS_OR_TORCHS = [pytest.param(optim.AdamW, marks=pytest.mark.compiled), torch.optim.AdamW, torch.optim.RMSprop]


@pytest.mark.parametrize("kind", OURS_OR_TORCHS)
def test_the_report_says_how_it_updates(kind, monkeypatch):
    monkeypatch.setattr(report_notes, "one_pass_is_profitable", lambda device, elements: elements > 100_000)
    model, optimizer = build(kind)
    train(model, optimizer, 1)
    notes = [n for n in amp_graph.report(model, optimizer).notes if n.startswith("update: ")]
    weights = 16 * 64 + 64 + 64 * 2048 + 2048 + 2048 * 16
    wanted = {
        optim.AdamW: ["update: one pass"],
        torch.optim.AdamW: [
            f"update: {weights:,} weights are cast again after each; amp_graph.optim.AdamW would write their copies"
        ],
    }
    assert notes == wanted.get(kind, [])
    assert not any(n.startswith("update: ") for n in amp_graph.report(model).notes)


# -- what torch's kernels do ----------------------------------------------------------------------------


def reasons():
    def of_fp64(model, optimizer):
        model.unused.data, model.unused.grad = model.unused.data.double(), torch.ones(16).double()

    def with_gaps(model, optimizer):
        model.unused.data, model.unused.grad = torch.ones(32)[::2], torch.ones(16)

    def no_compiler(model, optimizer):
        def library(rule):
            raise CompilerError("no compiler here\n  fix: one")

        patch.setattr(optim, "library", library)

    def few(model, optimizer):
        patch.setattr(optim, "one_pass_is_profitable", lambda device, elements: False)

    patch = pytest.MonkeyPatch()
    return patch, {
        "is not fp32 on the CPU": of_fp64,
        "is not dense fp32": with_gaps,
        "no compiler here": no_compiler,
        "too few to be worth compiling": few,
        "dampening": lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.9, dampening=0.1),
    }


@pytest.mark.parametrize("why", reasons()[1])
def test_torchs_kernels_do_the_rest(why):
    patch, ways = reasons()
    results = []
    try:
        for kind in (optim.SGD, torch.optim.SGD):
            model, optimizer = build(kind, "", lr=0.1, fused=True)
            ways[why](model, optimizer)
            for i in range(3):
                backward(model, i)
                optimizer.step()
            results.append(everything(model, optimizer))
            if kind is optim.SGD:
                assert optimizer.how.startswith("torch's kernels: ")
                assert why in optimizer.how
    finally:
        patch.undo()
    assert same(*results)


def test_hooks_of_a_step_run_once_whoever_does_it(monkeypatch):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # puts hooks around the step of its class
    monkeypatch.setattr(optim, "one_pass_is_profitable", lambda device, elements: False)
    model, optimizer = build(optim.AdamW)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(optimizer.how))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    train(model, optimizer, 1)
    assert len(calls) == 2
    assert calls[0] == "before"
    assert "too few" in calls[1]


def test_a_class_of_ones_own_keeps_what_it_does():
    class Mine(optim.AdamW):
        def step(self, closure=None):
            self.before = True
            return super().step(closure)

    model, optimizer = build(Mine)
    train(model, optimizer, 2)
    other, theirs = build(torch.optim.AdamW, fused=True)
    train(other, theirs, 2)
    assert optimizer.before
    assert "Mine" in optimizer.how
    assert same(everything(model, optimizer), everything(other, theirs))


def test_refusals_say_what_is_legal():
    with pytest.raises(ScaleError, match=r"(?s)fused=False.*legal: fused=True.*fix: .*torch.optim.SGD"):
        optim.SGD([nn.Parameter(torch.ones(1))], fused=False)
    with pytest.raises(RuntimeError, match="foreach"):
        optim.SGD([nn.Parameter(torch.ones(1))], foreach=True)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        optim.AdamW([nn.Parameter(torch.ones(1))], lr=-1.0)
    assert "weight_decay" in str(__import__("inspect").signature(amp_graph.optim.AdamW))
    with pytest.raises(AttributeError, match=r"(?s)'RMSprop'.*legal: .*AdamW.*fix: .*torch\.optim\.RMSprop"):
        _ = amp_graph.optim.RMSprop
    with pytest.raises(AttributeError, match=r"no attribute 'Nothing'$"):
        _ = amp_graph.optim.Nothing

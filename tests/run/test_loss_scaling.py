"""``--policy fp16`` of ``amp-graph run``: losses are scaled behind the script's back, or its models stay as written."""

import json

import pytest
import torch
from torch import nn

from amp_graph.capture.conversion import conversion_of
from amp_graph.run import eligibility, trained_models
from amp_graph.run.scaled_backward import all_finite, unscaled
from amp_graph.run.trained_models import State
from tests.run.test_scripts import python
from tests.run.test_trained_models import Net, lines, state_of

POLICY = "fp16"  # of the models that are watched: conftest.py


def optimizer_of(model, kind=torch.optim.SGD, **options):
    return kind(model.parameters(), **{"lr": 0.1, **options})


def batches(count):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=g), torch.randn(16, 4, generator=g)) for _ in range(count)]


def net():
    torch.manual_seed(0)
    return Net()


def ordinary(optimizer, loss, **how):
    optimizer.zero_grad()
    loss.backward(**how)
    optimizer.step()


def accumulating(model, optimizer, data):
    """Gradients around 1e-9 are accumulated and clipped; returns the norms that the script sees."""
    for i, (x, y) in enumerate(data):
        ((model(x) - y).square().mean() * 1e-6 / 2).backward()
        if i % 2:
            yield nn.utils.clip_grad_norm_(model.parameters(), 1e-8)
            yield from [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def several_losses(model, optimizer, data):
    """Backwards from several losses at once, from given gradients, and from a sparse table."""
    table = nn.Embedding(8, 4, sparse=True)
    table.weight.data.zero_()
    for x, y in data:
        out, entries = model(x), table(torch.arange(16) % 8)
        first, second = (out + entries - y).square().mean() * 1e-6, out.abs().mean() * 1e-7
        optimizer.zero_grad()
        table.zero_grad()
        first.backward(retain_graph=True)
        torch.autograd.backward([second, first * 2], retain_graph=True)
        out.backward((out.detach() - y) * 1e-8)
        yield from [p.grad.clone() for p in model.parameters()]
        yield table.weight.grad.to_dense()
        optimizer.step()


@pytest.mark.parametrize("loop", [accumulating, several_losses])
def test_the_script_sees_the_gradients_of_fp32_where_fp16_loses_them(loop, watch):
    """Without a scale most are zero in fp16, as the control shows."""
    expected = list(loop(plain := net(), optimizer_of(plain), batches(6)))
    models, model = watch(), net()
    found = list(loop(model, optimizer_of(model), batches(6)))
    assert conversion_of(model) is not None, lines(models)
    for one, two in zip(expected, found, strict=True):
        assert (one - two).norm() <= 0.02 * one.norm()
    assert "fp16: losses scaled by 65536 at the end, 0 optimizer steps skipped" in lines(models)
    models.scaling._new_scale, models.scaling.begin = None, lambda new_scale: None
    broken = list(loop(model := net(), optimizer_of(model), batches(6)))
    assert conversion_of(model) is not None
    assert any((one - two).norm() > 0.1 * one.norm() for one, two in zip(expected, broken, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("clips", [None, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_step_whose_gradients_overflow_changes_nothing_and_the_next_is_as_before(kind, clips, watch):
    """Its third micro-batch overflows; those behind it, which add to NaN, halve the scale no further."""
    models, model = watch(), net()
    optimizer = optimizer_of(model, kind, lr=1e-3, weight_decay=0.1)
    kept = []
    for step in range(6):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches(4)):
            ((model(x) - y).square().mean() * (2.0**14 if (step, i) == (3, 2) else 1.0)).backward()
        if clips is not None:
            clips(model.parameters(), 1.0)
        optimizer.step()
        states = [v for kinds in optimizer.state.values() for v in kinds.values() if v is not None]
        kept.append([torch.as_tensor(v).detach().clone() for v in (*model.parameters(), *states)])
        assert all(p.grad is not None for p in model.parameters()), "the script finds its gradients"
    before, after, later = kept[2:5]
    assert all(map(torch.equal, before, after))
    assert not any(map(torch.equal, after, later))
    assert "losses scaled by 32768 at the end, 1 optimizer step skipped" in lines(models)


def test_of_two_optimizers_only_the_one_whose_gradients_overflowed_skips(watch):
    models, generator, critic = watch(), net(), nn.Sequential(nn.Linear(4, 1))
    first, second = optimizer_of(generator), optimizer_of(critic)
    moved = []
    for i, (x, y) in enumerate(batches(6)):
        before = generator.head.weight.detach().clone(), critic[0].weight.detach().clone()
        fake = generator(x)
        ordinary(second, critic(y).mean() - critic(fake.detach()).mean())
        ordinary(first, critic(fake).mean() * (2.0**16 if i == 4 else 1.0))  # reaches the critic as well
        after = generator.head.weight, critic[0].weight
        moved.append(tuple(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    assert conversion_of(generator) is not None, lines(models)
    assert conversion_of(critic) is not None
    assert moved == [(True, True)] * 4 + [(False, True), (True, True)]
    assert "1 optimizer step skipped" in lines(models)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


def with_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def with_hook(model, optimizer, x, y):
    out = model(x)
    out.register_hook(lambda grad: grad)
    ordinary(optimizer, (out - y).square().mean())


def with_parameter_hook(model, optimizer, x, y):
    handle = model.head.weight.register_hook(lambda grad: grad.clamp(-1, 1))
    ordinary(optimizer, (model(x) - y).square().mean())
    handle.remove()


def with_penalty(model, optimizer, x, y):
    x.requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ordinary(optimizer, grad.square().mean() + (model(x) - y).square().mean())


def with_strict_clipping(model, optimizer, x, y):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()


def with_scaler(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale((model(x) - y).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def without_optimizer(model, optimizer, x, y):
    (model(x) - y).square().mean().backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None


REFUSED = {
    "closure": (with_closure, eligibility.CLOSURE),
    "hook": (with_hook, eligibility.HOOKS),
    "parameter hook": (with_parameter_hook, eligibility.HOOKS),
    "penalty": (with_penalty, eligibility.AUTOGRAD_GRAD),
    "strict clipping": (with_strict_clipping, eligibility.STRICT),
    "scaler": (with_scaler, eligibility.OWN_SCALER),
    "no optimizer": (without_optimizer, eligibility.NO_STEP),
    "function": (lambda m, o, x, y: ordinary(o, (Clipped.apply(m(x)) - y).square().mean()), eligibility.FUNCTION),
    "create_graph": (lambda m, o, x, y: ordinary(o, m(x).square().mean(), create_graph=True), "create_graph=True"),
    "inputs": (lambda m, o, x, y: ordinary(o, m(x).square().mean(), inputs=[*m.parameters()]), "inputs=..."),
    "fp64": (lambda m, o, x, y: ordinary(o, m(x).double().square().mean()), "a loss that is no plain tensor in fp32"),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_see_the_scale_leaves_the_script_as_written_and_says_so(name, late, watch):
    how, reason = REFUSED[name]

    def train(model):
        optimizer = optimizer_of(model)
        for i, (x, y) in enumerate(batches(5)):
            if late and i < 3:
                ordinary(optimizer, (model(x) - y).square().mean())
            else:
                how(model, optimizer, x, y)

    plain, model = net(), net()
    train(plain)
    models = watch()
    train(model)
    if late and name == "no optimizer":  # cannot be told from any other loop
        assert conversion_of(model) is not None
        return
    assert conversion_of(model) is None
    assert reason in state_of(models, model)[1]
    assert lines(models).splitlines()[0] == "nothing was converted" or late
    assert ("in fp16 until then" in state_of(models, model)[1]) == late
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, two, atol=2e-3) if late else torch.equal(one, two)


def test_a_model_that_overflows_in_fp16_becomes_fp32_again(watch):
    models, model = watch(), net()
    optimizer = optimizer_of(model, lr=1e-4)
    for i, (x, y) in enumerate(batches(6)):
        ordinary(optimizer, (model(x * (1e5 if i > 2 else 1.0)) - y).abs().mean())
    assert eligibility.OVERFLOWS in state_of(models, model)[1]
    assert all(p.isfinite().all() for p in model.parameters())
    assert models.scaling.skipped == 1


WRONG = {
    "a second time": lambda out: ((out.sum() * 1e-3).backward(), out.sum().backward()),
    "no scalar": lambda out: out.backward(),
    "a wrong shape": lambda out: out.backward(torch.ones(3)),
    "no graph": lambda out: out.detach().sum().backward(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_refused_with_its_words_and_gradients_stay_unscaled(name, watch):
    def failing(model):
        optimizer = optimizer_of(model)
        for x, y in batches(3):
            ordinary(optimizer, (model(x) - y).square().mean())
        with pytest.raises(RuntimeError) as caught:
            WRONG[name](model(batches(1)[0][0]))
        return str(caught.value), [p.grad for p in model.parameters()]

    expected, grads = failing(net())
    models, model = watch(), net()
    found, others = failing(model)
    assert conversion_of(model) is not None, lines(models)
    assert found == expected
    norms = [(one.norm(), two.norm()) for one, two in zip(grads, others, strict=True)]
    assert all(one / 4 <= two <= 4 * one for one, two in norms), "a failed backward may have added a part"


def test_a_dry_run_converts_nothing_and_a_communication_hook_that_may_keep_an_overflow_is_left(watch):
    models, model, hooked = watch(dry_run=True), net(), net()
    hooked._comm_hooks = [(lambda state, bucket: None, None)]
    for one in (model, hooked):
        optimizer = optimizer_of(one)
        for x, y in batches(3):
            ordinary(optimizer, (one(x) - y).square().mean())
    assert lines(models).startswith("would convert 1 model, policy fp16-O1")
    assert conversion_of(model) is None
    assert state_of(models, hooked) == (State.LEFT, eligibility.COMM_HOOK)


@pytest.mark.parametrize(("factor", "first"), [(1e-3, 65536), (2.0**9 / 4, 512), (2.0**9 * 1e6, 16)])
def test_a_sum_over_a_batch_begins_at_a_lower_scale(factor, first, watch):
    """Of a mean around 1 this is GradScaler's first scale; a sum has gradients that are larger by its factor."""
    models, model = watch(), net()
    optimizer = optimizer_of(model, lr=1e-9)
    for x, y in batches(3):
        out = model(x)
        ordinary(optimizer, (out - out.detach() + y * 0).square().mean() + factor)
    assert conversion_of(model) is not None, lines(models)
    assert f"losses scaled by {first} at the end, 0 optimizer steps skipped" in lines(models)


# -- several ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_left", [False, True])
def test_over_ranks_steps_are_skipped_for_what_can_be_in_fp16(is_left, watch, monkeypatch):
    """A shard's gradient is one rank's own: a step that only one rank leaves out would part the shards."""
    watch()
    model = net()
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(trained_models.why, "why_left", lambda module, policy: "sharded" if is_left else "")
    optimizer = optimizer_of(model)
    ((x, y),) = batches(1)
    ordinary(optimizer, (model(x) - y).square().mean())
    before = model.head.bias.detach().clone()
    model.head.weight.grad.fill_(torch.inf)
    optimizer.step()
    assert torch.equal(model.head.bias, before) != is_left


def test_gradients_are_unscaled_before_they_are_accumulated_and_an_overflow_outlives_clipping():
    """What DDP averages is the leaf's gradient as it is accumulated: it is seen unscaled there."""
    weight, seen, checks = nn.Parameter(torch.ones(4)), [], []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for factors in ([3.0] * 4, [3.0] * 4, [3.0, 1e38, 3.0, 3.0]):
        with unscaled([weight], 2.0**-16, checks):
            (weight * torch.tensor(factors)).sum().backward(torch.tensor(2.0**16))
    assert [grad.tolist() for grad in seen[:2]] == [[3.0] * 4, [6.0] * 4]
    assert not weight._backward_hooks
    assert [all_finite([check]) for check in checks] == [True, True, False]
    nn.utils.clip_grad_value_([weight], 1.0)
    assert weight.grad.isnan().all()


RANKS = """
import json, torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
OPTIONS = {
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


def backwards(kind, model, overflows):
    count = 3 if kind == "no_sync" else 1
    for i in range(count):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        # a gradient of 2^16 overflows in fp16 when it is scaled, and is none of an fp32 training's worries
        loss = (model(x) - y).square().mean() * (2.0**16 if overflows and i == 0 and rank == 1 else 1.0)
        if i < count - 1:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()


def train(kind):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    hand, params = kind.startswith("hand"), [*plain.parameters()]
    model = plain if hand else DistributedDataParallel(plain, **OPTIONS.get(kind, {}))
    if kind == "compressed":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    torch.manual_seed(rank)
    history = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=kind != "view")
        backwards(kind, model, step == 4)
        if kind == "hand, clipped first":
            torch.nn.utils.clip_grad_value_(params, 0.5)
        for p in params if hand else ():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if kind == "clipped":
            torch.nn.utils.clip_grad_value_(params, 0.5)
        if kind == "hook" and step == 5 and rank == 0:  # from now on, one rank cannot scale
            plain[2].weight.register_hook(lambda grad: grad.clone())
        before = [p.detach().clone() for p in params]
        optimizer.step()
        moved = not all(map(torch.equal, before, params))
        weights, grads = (torch.cat([x.flatten() for x in found]) for found in (params, [p.grad for p in params]))
        history.append((moved, weights.double().norm().item(), grads.norm().item()))
    return type(plain.forward).__name__, history


KINDS = ("ddp", "no_sync", "unused", "view", "static", "compressed", "clipped", "hand", "hand, clipped first", "hook")
found = {kind: train(kind) for kind in KINDS}
with open(f"rank{rank}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_agree_on_the_step_that_one_of_them_would_skip(tmp_path):
    """By DDP with its options, and without DDP; the last one scales on one rank only from its sixth step on."""
    (tmp_path / "ranks.py").write_text(RANKS)
    told, launch = [], ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    for words in ((), ("-m", "amp_graph", "run", "--policy", "fp16")):
        status, _, errors = python(tmp_path, *launch, *words, "ranks.py")
        assert status == 0, errors
        told.append([json.loads((tmp_path / f"rank{i}.json").read_text()) for i in range(2)])
    (plain, _), (first, second) = told
    assert "10 optimizer steps skipped" in errors, errors
    for kind, (forward, history) in first.items():
        other, theirs = second[kind]
        assert [step[:2] for step in history] == [step[:2] for step in theirs], kind
        assert [step[0] for step in history] == [step != 4 for step in range(8)], kind
        assert (forward, other) == ("Conversion" if kind != "hook" else "method", "Conversion"), errors
        for one, exact in zip(history[:4], plain[kind][1][:4], strict=True):
            assert one[1:] == pytest.approx(exact[1:], rel=2e-2), f"{kind}: before the overflow, as in fp32"
        assert 0.5 < history[7][2] / plain[kind][1][7][2] < 2, f"{kind}: gradients are unscaled"

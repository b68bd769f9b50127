"""``--policy fp16`` of ``amp-graph run``: losses are scaled behind the script's back, or its models stay as written."""

import pytest
import torch
from torch import nn

from amp_graph.capture.conversion import conversion_of
from amp_graph.run import eligibility, loss_scaling, trained_models
from amp_graph.run.trained_models import State
from tests.run.test_trained_models import Net, lines, state_of

POLICY = "fp16"


def made(model, kind=torch.optim.SGD, **options):
    """Return an optimizer of a new class: torch wraps ``step`` when the first optimizer of a class is made."""
    step = {"step": lambda self, closure=None: kind.step(self, closure)}
    return type(kind.__name__, (kind,), step)(model.parameters(), **{"lr": 0.1, **options})


def batches(count):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=g), torch.randn(16, 4, generator=g)) for _ in range(count)]


def net():
    torch.manual_seed(0)
    return Net()


def simple(model, optimizer, data, seen):
    for x, y in data:
        loss = (model(x) - y).square().mean() * 1e-4
        optimizer.zero_grad()
        loss.backward()
        seen.append((loss.item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()


def accumulating(model, optimizer, data, seen):
    for i, (x, y) in enumerate(data):
        loss = (model(x) - y).square().mean() * 1e-4
        (loss / 2).backward()
        if i % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
            seen.append((norm.item(), [p.grad.clone() for p in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def several_losses(model, optimizer, data, seen):
    for x, y in data:
        out = model(x)
        first, second = (out - y).square().mean() * 1e-4, out.abs().mean() * 1e-5
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        torch.autograd.backward([second, first * 2])
        seen.append((first.item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()


def regularized(model, optimizer, data, seen):
    """A loss of parameters beside the model's, and a gradient of outputs given by hand."""
    for x, y in data:
        optimizer.zero_grad()
        out = model(x)
        (1e-6 * sum(p.square().sum() for p in model.parameters())).backward()
        out.backward((out.detach() - y) * 1e-6)
        seen.append((out.mean().item(), [p.grad.clone() for p in model.parameters()]))
        optimizer.step()


LOOPS = {f.__name__: f for f in (simple, accumulating, several_losses, regularized)}


@pytest.mark.parametrize("name", LOOPS)
def test_the_script_sees_the_gradients_of_fp32_where_fp16_loses_them(name, watch):
    """The gradients are about 1e-7: without a scale most are zero in fp16. They are seen as the script sees them."""
    expected, found, model, plain = [], [], net(), net()
    LOOPS[name](plain, made(plain), batches(6), expected)
    models = watch()
    LOOPS[name](model, made(model), batches(6), found)
    assert conversion_of(model) is not None, lines(models)
    for (a, grads), (b, others) in zip(expected, found, strict=True):
        assert b == pytest.approx(a, rel=0.01)
        for one, two in zip(grads, others, strict=True):
            assert (one - two).norm() <= 0.02 * one.norm()
    assert "fp16: losses scaled by 65536 at the end, 0 optimizer steps skipped" in lines(models)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("clips", [None, "norm", "value"])
def test_a_step_whose_gradients_overflow_changes_nothing_and_the_next_is_as_before(kind, clips, watch):
    models, model = watch(), net()
    optimizer = made(model, kind, lr=1e-3, weight_decay=0.1)
    factors = [1.0, 1.0, 1.0, 2.0**14, 1.0, 1.0]  # a gradient of 2^14 times 2^16 overflows, and so does one of 2^15
    kept = []
    for (x, y), factor in zip(batches(6), factors, strict=True):
        optimizer.zero_grad()
        ((model(x) - y).square().mean() * factor).backward()
        if clips == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if clips == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        state = {
            i: {k: torch.as_tensor(v).clone() for k, v in kinds.items()}
            for i, kinds in enumerate(optimizer.state.values())
        }
        kept.append(([p.detach().clone() for p in model.parameters()], state))
    (before, old), (after, new), (later, _) = kept[2:5]
    assert all(map(torch.equal, before, after))
    assert all(torch.equal(new[i][k], v) for i, kinds in old.items() for k, v in kinds.items())
    assert not any(map(torch.equal, after, later))
    assert "losses scaled by 32768 at the end, 1 optimizer step skipped" in lines(models)


def test_of_two_optimizers_only_the_one_whose_gradients_overflowed_skips(watch):
    models, generator, critic = watch(), net(), nn.Sequential(nn.Linear(4, 1))
    first, second = made(generator), made(critic)
    moved = []
    for i, (x, y) in enumerate(batches(6)):
        before = generator.head.weight.detach().clone(), critic[0].weight.detach().clone()
        fake = generator(x)
        second.zero_grad()
        (critic(y).mean() - critic(fake.detach()).mean()).backward()
        second.step()
        first.zero_grad()
        (critic(fake).mean() * (2.0**16 if i == 4 else 1.0)).backward()  # reaches the critic as well
        first.step()
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


def ordinary(optimizer, loss, **how):
    optimizer.zero_grad()
    loss.backward(**how)
    optimizer.step()


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


def with_sparse(model, optimizer, x, y):
    table = nn.Embedding(8, 4, sparse=True)
    table.weight.data.zero_()
    ordinary(optimizer, (model(x) + table(torch.arange(16) % 8) - y).square().mean())
    assert table.weight.grad.to_dense().abs().max() < 10, "unscaled"


REFUSED = {
    "sparse": (with_sparse, eligibility.SPARSE),
    "closure": (with_closure, eligibility.CLOSURE),
    "hook": (with_hook, eligibility.HOOKS),
    "parameter hook": (with_parameter_hook, eligibility.HOOKS),
    "penalty": (with_penalty, eligibility.AUTOGRAD_GRAD),
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
        optimizer = made(model)
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
    optimizer = made(model, lr=1e-4)
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
        optimizer = made(model)
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


def test_a_dry_run_says_what_fp16_would_convert(watch):
    models, model = watch(dry_run=True), net()
    optimizer = made(model)
    for x, y in batches(3):
        ordinary(optimizer, (model(x) - y).square().mean())
    assert lines(models).startswith("would convert 1 model, policy fp16-O1")
    assert conversion_of(model) is None


def test_what_would_keep_an_overflow_is_left(watch):
    """DataParallel's replicas, and a communication hook that may keep what it saw; those of DDP are not scaled here."""
    models, model, other = watch(), nn.DataParallel(net()), net()
    other._comm_hooks = [(lambda state, bucket: None, None)]
    for one in (model, other):
        optimizer = made(one)
        for x, y in batches(3):
            ordinary(optimizer, (one(x) - y).square().mean())
    assert state_of(models, model) == (State.LEFT, eligibility.REPLICAS)
    assert state_of(models, other) == (State.LEFT, eligibility.COMM_HOOK)


def test_several_overflows_between_steps_halve_the_scale_once(watch):
    """Micro-batches behind one that overflowed add to a gradient that is infinite already."""
    models, model = watch(), net()
    optimizer = made(model)
    for step in range(4):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches(20)):
            ((model(x) - y).square().mean() * (2.0**14 if (step, i) == (2, 1) else 1.0)).backward()
        optimizer.step()
    assert "losses scaled by 32768 at the end, 1 optimizer step skipped" in lines(models)
    assert conversion_of(model) is not None


@pytest.mark.parametrize("is_left", [False, True])
def test_over_ranks_steps_are_skipped_for_what_can_be_in_fp16(is_left, watch, monkeypatch):
    """A shard's gradient is one rank's own: a step that only one rank leaves out would part the shards."""
    watch()
    model = net()
    monkeypatch.setattr(loss_scaling, "are_several", lambda: True)
    monkeypatch.setattr(trained_models.why, "why_left", lambda module, policy: "sharded" if is_left else "")
    optimizer = made(model)
    ((x, y),) = batches(1)
    ordinary(optimizer, (model(x) - y).square().mean())
    before = model.head.bias.detach().clone()
    model.head.weight.grad.fill_(torch.inf)
    optimizer.step()
    assert torch.equal(model.head.bias, before) != is_left


@pytest.mark.parametrize(("factor", "first"), [(1e-3, 65536), (2.0**9 / 4, 512), (2.0**9 * 1e6, 16)])
def test_a_sum_over_a_batch_begins_at_a_lower_scale(factor, first, watch):
    """Of a mean around 1 this is GradScaler's first scale; a sum has gradients that are larger by its factor."""
    models, model = watch(), net()
    optimizer = made(model, lr=1e-9)
    for x, y in batches(3):
        out = model(x)
        ordinary(optimizer, (out - out.detach() + y * 0).square().mean() + factor)
    assert conversion_of(model) is not None, lines(models)
    assert f"losses scaled by {first} at the end, 0 optimizer steps skipped" in lines(models)

"""Gradients that fp16 cannot hold are said to be, at the first backward that has some; and nothing else is."""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.errors import AmpGraphWarning

SAID = "gradients are too small for fp16"


def mlp(width=32, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width, **options), nn.ReLU(), nn.Linear(width, 4, **options))


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (8,), generator=torch.Generator().manual_seed(2))


def trained(model, loss=lambda out: F.cross_entropy(out, Y), steps=1, policy="fp16", scale=1.0, x=X):
    """Return what was said while a converted model was trained."""
    model = amp_graph.convert(model, policy)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            (loss(model(x)) * scale).backward()
    return [str(one.message) for one in found if issubclass(one.category, AmpGraphWarning)]


def test_a_loss_that_is_too_small_is_said_once_with_the_fix():
    model = mlp()
    (said,) = trained(model, scale=2.0**-30, steps=8)
    assert SAID in said
    assert "fix:" in said
    assert "scaler = amp_graph.GradScaler(); scaler.scale(loss).backward()" in said
    assert not any(p.grad.any() for p in model.parameters()), "which was the fault"
    assert any(SAID in note for note in amp_graph.report(model).notes)
    with torch.autocast("cpu", torch.float16):
        plain = mlp()
        (F.cross_entropy(plain(X), Y) * 2.0**-30).backward()
    assert not any(p.grad.any() for p in plain[:2].parameters()), "under autocast as well, which says nothing"


def test_what_is_lost_inside_is_said():
    """The gradient at the output is well; fp16 has no room for what the last layer makes of it."""
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
        model[2].bias.zero_()
    model.append(nn.Hardtanh())
    model[2].requires_grad_(False)
    (said,) = trained(model, lambda out: out.sum() / 100)
    assert SAID in said


def test_a_mean_over_many_numbers_is_said():
    (said,) = trained(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 1, 3)), lambda out: out.mean(),
                      x=torch.randn(8, 1, 200, 200))  # fmt: skip
    assert SAID in said


def test_a_loss_that_the_model_computes_is_said():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return F.cross_entropy(self.inner(x), Y) * 2.0**-14

    (said,) = trained(WithLoss(), lambda out: out)
    assert SAID in said
    assert "parameters" in said


def test_a_loss_that_shrinks_is_said_later():
    model = amp_graph.convert(mlp(), "fp16")
    F.cross_entropy(model(X), Y).backward()
    small = lambda: (F.cross_entropy(model(X), Y) * 2.0**-30).backward()  # noqa: E731
    with pytest.warns(AmpGraphWarning, match=SAID):
        small()
    small()


def zero_residual():
    model = mlp()
    nn.init.zeros_(model[2].weight)
    return model


def adapter():
    """As LoRA begins: one factor is zero, and the other has no gradient yet."""
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model[1].weight)
    return model


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def dead():
    model = mlp()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    return model


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.words(x.abs().long()).mean(1))


QUIET = {
    "an ordinary loss": (mlp, lambda out: F.cross_entropy(out, Y)),
    "a loss of zero": (mlp, lambda out: (out * 0).sum()),
    "a masked loss": (mlp, lambda out: F.cross_entropy(out, torch.full_like(Y, -100), reduction="sum")),
    "half of it masked": (mlp, lambda out: F.cross_entropy(out, torch.where(Y > 1, -100, Y))),
    "a zero layer": (zero_residual, lambda out: F.cross_entropy(out, Y)),
    "an adapter": (adapter, lambda out: F.cross_entropy(out, Y)),
    "frozen layers": (frozen, lambda out: F.cross_entropy(out, Y)),
    "dead units": (dead, lambda out: F.cross_entropy(out, Y)),
    "padding": (Padded, lambda out: F.cross_entropy(out, Y)),
    "an infinite loss": (mlp, lambda out: (out * float("inf")).sum()),
    "no number": (mlp, lambda out: (out * float("nan")).sum()),
    "a large loss": (mlp, lambda out: F.cross_entropy(out, Y) * 2.0**16),
}


@pytest.mark.parametrize("name", QUIET)
def test_zeros_that_are_right_are_not_complained_of(name):
    make, loss = QUIET[name]
    assert trained(make(), loss, steps=2) == []


@pytest.mark.parametrize("policy", ["bf16", "fp16-O0"])
def test_other_precisions_are_not_looked_at(policy):
    assert trained(mlp(), scale=2.0**-30, policy=policy) == []


@pytest.mark.parametrize("scaler", [amp_graph.GradScaler, lambda: torch.amp.GradScaler("cpu")])
def test_a_scaler_that_holds_them_is_believed(scaler):
    model = amp_graph.convert(mlp(), "fp16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), scaler()
    for _ in range(4):
        scaler.scale(F.cross_entropy(model(X), Y) * 2.0**-20).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_parameters_in_fp16_are_looked_at():
    (said,) = trained(mlp(), scale=2.0**-30, policy="fp16-O2")
    assert SAID in said


def test_gradients_of_the_input_alone_second_ones_and_evaluation_are_as_before():
    model = amp_graph.convert(mlp().requires_grad_(False), "fp16")
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert grad.abs().max() > 0
    with torch.no_grad():
        model(X)
    model.requires_grad_(True)
    torch.autograd.grad(model(X).sum(), list(model.parameters()))


def test_values_are_those_without_the_watch(monkeypatch):
    def grads():
        model = amp_graph.convert(mlp(), "fp16")
        F.cross_entropy(model(X), Y).backward()
        return [p.grad for p in model.parameters()]

    watched = grads()
    monkeypatch.setattr("amp_graph.capture.gradient_underflow.UnderflowWatch.after", lambda self, results: None)
    for a, b in zip(watched, grads(), strict=True):
        assert torch.equal(a, b)


def test_a_backward_that_raises_leaves_nothing_behind():
    model = amp_graph.convert(mlp(), "fp16")
    out = model(X)
    out.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("the user's")))
    with contextlib.suppress(ValueError):
        out.sum().backward()
    for _ in range(2):
        F.cross_entropy(model(X), Y).backward()


def test_a_model_goes_when_it_is_let_go():
    model = amp_graph.convert(mlp(), "fp16")
    F.cross_entropy(model(X), Y).backward()
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_a_backward_inside_a_backward():
    inner, outer = amp_graph.convert(mlp(), "fp16"), amp_graph.convert(mlp(), "fp16")

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                F.cross_entropy(inner(X) + outer(X), Y).backward()
            return grad

    F.cross_entropy(Reentrant.apply(outer(X)), Y).backward()
    assert all(p.grad is not None for p in [*inner.parameters(), *outer.parameters()])


def test_gradients_that_are_accumulated():
    model = amp_graph.convert(mlp(), "fp16")
    for _ in range(4):
        (F.cross_entropy(model(X), Y) / 4).backward()

"""`optimizer.step(closure)` at level O2: the closure finds the parameters, the optimizer their masters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.optim.master_weights import master_of

X, Y = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 4
MAKE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Rprop": torch.optim.Rprop,
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=4),
    "LBFGS, with line search": lambda p: torch.optim.LBFGS(p, 1, max_iter=4, line_search_fn="strong_wolfe"),
}


def build(kind, policy, late=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = MAKE[kind](model.parameters()) if late else None
    amp_graph.convert(model, policy)
    return model, optimizer or MAKE[kind](model.parameters())


def train(model, optimizer, call, steps=4):
    """Losses of some steps, made as `call` says."""

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        if call == "closure":
            losses.append(optimizer.step(closure).item())
        elif call == "by name":
            losses.append(optimizer.step(closure=closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MAKE if "LBFGS" not in kind])
def test_a_closure_that_is_called_once_is_the_loop_without_it(kind, late):
    one, two = build(kind, "bf16-O2", late), build(kind, "bf16-O2", late)
    assert train(*one, "by name" if late else "closure") == train(*two, "loop")
    for p, q in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(master_of(p), master_of(q))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in MAKE if "LBFGS" in kind])
def test_a_closure_that_is_called_often_sees_what_was_updated(kind, late):
    """At O1 the same rounded weights are multiplied: the same losses, bit for bit."""
    model, optimizer = build(kind, "bf16-O2", late)
    assert train(model, optimizer, "closure") == train(*build(kind, "bf16"), "closure")
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    for p in model.parameters():
        assert torch.equal(master_of(p).bfloat16(), p)


def test_a_closure_without_gradients_of_all():
    model, optimizer = build("SGD", "bf16-O2")
    before = master_of(model[0].weight).clone()
    optimizer.step(lambda: model[2].bias.sum().backward())
    assert torch.equal(master_of(model[0].weight), before)
    assert model[2].bias.grad is not None


def test_what_a_closure_raises_comes_through_and_the_next_step_is_as_ever():
    model, optimizer = build("AdamW", "bf16-O2")
    one, two = build("AdamW", "bf16-O2"), (model, optimizer)

    def closure():
        raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        optimizer.step(closure)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert "_amp_graph_masters" not in vars(optimizer)
    assert train(*one, "closure") == train(*two, "closure")


def test_what_a_closure_writes_into_parameters_counts():
    model, optimizer = build("SGD", "bf16-O2")

    def closure():
        with torch.no_grad():
            model[2].bias.fill_(3.0)
        optimizer.zero_grad()
        model[2].bias.sum().backward()

    optimizer.step(closure)
    assert torch.equal(master_of(model[2].bias), torch.full((4,), 2.5))

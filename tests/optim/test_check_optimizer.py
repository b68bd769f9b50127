"""Optimizers that need a closure, and checkpoints of another model: refused before anything changes."""

import copy
import inspect

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.errors import ScaleError
from amp_graph.optim.check_optimizer import load_or_refuse, refuse_state_of_another_model

X, Y = torch.randn(8, 16), torch.randint(0, 4, (8,))
LOSS = nn.CrossEntropyLoss()
KINDS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop, behind the graph": torch.optim.RMSprop,
}


def net(width=8):
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def trained(kind, width, policy="fp16"):
    model = net(width)
    optimizer = kind(model.parameters())
    step = amp_graph.TrainStep(model, LOSS, optimizer, policy)
    step(X, Y)
    return model, optimizer, step


def state_of(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(two), strict=True))


def tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["fp16", "bf16-O2"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_refuses_the_state_of_another_model(name, policy):
    _, theirs, _ = trained(KINDS[name], 8, policy)
    model, optimizer, step = trained(KINDS[name], 512, policy)  # whose moments a kernel would read behind their end
    before = state_of(model, optimizer)
    with pytest.raises(ScaleError, match=r"of shape \(8, 16\) for parameter 0, whose shape is \(512, 16\)(?s:.*)fix:"):
        optimizer.load_state_dict(theirs.state_dict())
    assert same(state_of(model, optimizer), before)
    step(X, Y)
    optimizer.load_state_dict(before[1])
    assert not same(state_of(model, optimizer)[0], before[0])


@pytest.mark.parametrize("name", KINDS)
def test_a_step_refuses_an_optimizer_that_was_given_the_state_of_another_model(name):
    _, theirs, _ = trained(KINDS[name], 8)
    model = net(512)
    optimizer = KINDS[name](model.parameters())
    optimizer.load_state_dict(theirs.state_dict())
    before = state_of(model, optimizer)
    with pytest.raises(ScaleError, match=r"TrainStep: the state of \w+ has .* of shape \(8, 16\)"):
        amp_graph.TrainStep(model, LOSS, optimizer, "fp16")(X, Y)
    assert same(state_of(model, optimizer), before)


def test_mixed_precision_optimizer_refuses_the_state_of_another_model_without_masters():
    saved = []
    for width in (8, 512):
        model = net(width)
        optimizer = amp_graph.MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), dynamic_loss_scale=True)
        optimizer.backward(LOSS(model(X), Y))
        optimizer.step()
        saved.append(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ScaleError, match=r"'exp_avg' of shape \(8, 16\)"):
        optimizer.load_state_dict({**saved[0], "masters": []})
    assert optimizer.state_dict()["loss_scale"] == saved[1]["loss_scale"]
    assert same(optimizer.state_dict(), saved[1])
    optimizer.load_state_dict(saved[1])


def every_optimizer():
    kinds = [k for k in vars(torch.optim).values() if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)]
    return [k for k in kinds if k not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)]


@pytest.mark.parametrize("kind", every_optimizer(), ids=lambda kind: kind.__name__)
def test_no_optimizer_of_torch_has_its_own_state_refused(kind):
    """With every option that brings state; the shapes of a matrix, and where it can be of a vector and a number."""
    matrix, others = torch.ones(6, 5), [] if kind.__name__ == "Muon" else [torch.ones(5), torch.ones(())]
    params = [nn.Parameter(p) for p in (matrix, *others)]
    known = inspect.signature(kind).parameters
    options = {"momentum": 0.9, "amsgrad": True, "centered": True, "lr": 0.01}
    optimizer = kind(params, **{k: v for k, v in options.items() if k in known and kind.__name__ != "Adafactor"})
    for p in params:
        p.grad = torch.full_like(p, 0.1)
    optimizer.step()
    refuse_state_of_another_model("test", optimizer, vars(optimizer))
    refuse_state_of_another_model("test", optimizer, optimizer.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    load_or_refuse("here", optimizer, state)
    older = copy.deepcopy(state)
    older["param_groups"][0].pop("differentiable", None)  # as a checkpoint of an older torch
    load_or_refuse("here", optimizer, older)


def test_optimizers_that_need_a_closure_are_refused():
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.LBFGS(model.parameters())
    scaler = amp_graph.GradScaler("cpu")
    scaler.scale(LOSS(model(X), Y)).backward()
    for call in (
        lambda: scaler.step(optimizer),
        lambda: amp_graph.TrainStep(model, LOSS, optimizer, "bf16-O2"),
        lambda: amp_graph.MixedPrecisionOptimizer(optimizer),
    ):
        with pytest.raises(ScaleError, match=r"LBFGS.step needs a closure(?s:.*)legal:(?s:.*)fix:"):
            call()
    assert same(model.state_dict(), before)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    scaler.step(torch.optim.SGD(model.parameters(), 0.1))

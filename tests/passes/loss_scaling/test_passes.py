"""Each pass of loss scaling alone, on joint graphs of users: the numbers of eager, and errors that say what to do."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amp_graph.passes.base import PassError, VerifyError
from amp_graph.passes.loss_scaling import (
    AverageOverRanks,
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    joint_of,
    name_exported,
    name_joint,
)
from amp_graph.passes.manager import run_passes
from tests.layers import function_of
from tests.passes.loss_scaling.joint_graphs import (
    FAST,
    batch,
    exported,
    gradients,
    joint_of_aot_module,
    model_with_loss,
    state,
    traced,
)

INF = float("inf")


def leaf(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def run(gm, *passes):
    run_passes(gm, passes, checked=True, strict=True)
    return gm


LOSSES = {
    "fp32": (lambda a, b: (a @ b).square().mean(), (leaf(3, 4), leaf(4, 2))),
    "fp16": (
        lambda a, b: (a @ b).square().float().mean(),
        (leaf(3, 4, dtype=torch.half), leaf(4, 2, dtype=torch.half)),
    ),
    "low loss": (lambda a: (a * 0.37).sum().bfloat16(), (leaf(5),)),
    "low loss of a shape": (lambda a: (a * 0.37).sum().bfloat16().reshape(1), (leaf(5),)),
    "fp64": (lambda a: a.double().square().sum(), (leaf(5),)),
    "one gradient for two": (lambda a, b, c: ((a + b) * c).sum(), (leaf(4), leaf(4), leaf(4))),
    "an expanded gradient": (lambda a, b: a.sum() + b.sum() * 0.5, (leaf(2, 3), leaf(()))),
    "the parameter itself": (lambda a: a * 1.0, (leaf(()),)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
@pytest.mark.parametrize("name", LOSSES)
def test_scaled_gradients_are_those_of_the_scaled_loss(name, mode):
    compute, leaves = LOSSES[name]
    gm = traced(compute, *leaves, mode=mode)
    name_joint(gm, {str(i): i + 1 for i in range(len(leaves))})
    run(gm, ScaleLoss(micro_batches=7))
    scale = torch.tensor(1300.0)
    found = gm(*leaves, scale)
    loss = compute(*leaves)
    expected = torch.autograd.grad(loss * scale / 7, leaves)
    assert torch.equal(found[0], loss)
    assert all(map(torch.equal, found[1:], expected))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
@pytest.mark.parametrize("name", [name for name in LOSSES if "itself" not in name])
def test_unscaled_and_clipped_gradients_are_those_of_eager(name, mode):
    compute, leaves = LOSSES[name]
    before = [one.detach().clone() for one in leaves]
    gm = traced(compute, *leaves, mode=mode)
    name_joint(gm, {str(i): i + 1 for i in range(len(leaves))})
    run(gm, ScaleLoss(), CheckFiniteAndUnscale(), ClipGradients(norm=0.5, value=0.2), FAST)
    held = state()
    found = [*gradients(gm, gm(*leaves, *held)).values()]
    twins = [one.detach().clone().requires_grad_() for one in leaves]
    (compute(*twins) * 1024.0).backward()
    for twin in twins:
        twin.grad = twin.grad.clone() / 1024.0
    nn.utils.clip_grad_norm_(twins, 0.5)
    nn.utils.clip_grad_value_(twins, 0.2)
    assert all(torch.equal(a, b.grad) for a, b in zip(found, twins, strict=True))
    assert all(map(torch.equal, leaves, before)), "no input but those of the scale is written"
    assert held[0] == 2048.0


def test_an_infinite_gradient_shows_in_the_verdict_and_the_scale():
    model, (x, y) = model_with_loss(), batch()
    gm, signature = exported(model, x, y)
    name_exported(gm, signature)
    run(gm, ScaleLoss(), CheckFiniteAndUnscale(), FAST)
    held = state()
    found = gm(*model.parameters(), x * INF, y, *held)
    assert found[joint_of(gm).found_inf] == 1
    assert [t.item() for t in held] == [512.0, 0, 0, 1, 0]


def test_the_graph_of_aot_module_is_called_with_flat_inputs():
    model, (x, y) = model_with_loss(), batch()
    gm = joint_of_aot_module(model, x, y)
    name_joint(gm, {"fc.weight": 1, "fc.bias": 2})
    run(gm, ScaleLoss(), CheckFiniteAndUnscale())
    found = gm(*model.parameters(), x, y, torch.ones(()), torch.tensor(8.0))
    expected = torch.autograd.grad(model(x, y)[0], [*model.parameters()])
    assert all(map(torch.equal, gradients(gm, found).values(), expected))


def test_a_gradient_that_is_an_input_is_copied_before_it_is_written():
    given = function_of(lambda a, x: (a * x).sum(), lambda grad, a, x: (x, None))
    a, x = leaf(3), leaf(3, seed=1).detach()
    gm = make_fx(lambda a, x: (loss := given.apply(a, x), *torch.autograd.grad(loss, [a])), tracing_mode="fake")(a, x)
    name_joint(gm, {"a": 1}, seed=next(iter(gm.graph.find_nodes(op="placeholder"))))
    before = x.clone()
    run(gm, ClipGradients(value=0.01))
    found = gm(a, x)
    assert torch.equal(x, before)
    assert torch.equal(found[1], x.clamp(-0.01, 0.01))


ORDERS = [
    (CheckFiniteAndUnscale(),),
    (ScaleLoss(), ScaleLoss()),
    (ScaleLoss(), ClipGradients(norm=1.0)),
    (ClipGradients(norm=1.0), ScaleLoss(), CheckFiniteAndUnscale()),
    (FAST,),
    (ScaleLoss(), CheckFiniteAndUnscale(), AverageOverRanks("0", 2)),
    (ScaleLoss(), CheckFiniteAndUnscale(), ScaleLoss()),
]


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: "-".join(one.name for one in passes))
def test_another_order_is_an_error_with_its_fix_and_changes_nothing(passes):
    gm = traced(*_plain())
    name_joint(gm, {"a": 1})
    with pytest.raises(PassError, match="fix: "):
        run_passes(gm, passes)
    assert joint_of(gm).scale == ""
    assert len(gm.graph.find_nodes(op="placeholder")) == 1


def _plain():
    return lambda a: a.square().mean(), leaf(3)


def test_a_graph_without_names_is_an_error_that_says_how_to_give_them():
    with pytest.raises(PassError, match="name_joint"):
        ScaleLoss().run(traced(*_plain()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gradients": {"a": 7}}, "the gradient of a is given as 7"),
        ({"gradients": {"a": "none"}}, "the gradient of a is given as 'none'"),
        ({"gradients": {"a": 1}, "loss": 1}, "is no loss"),
        ({"gradients": {"a": 1}, "seed": "nowhere"}, "nowhere is no node"),
        ({"gradients": {"a": 1}, "parameters": {"a": "nowhere"}}, "nowhere is no input"),
    ],
)
def test_names_that_are_not_in_the_graph_are_errors(options, match):
    with pytest.raises(PassError, match=match):
        name_joint(traced(*_plain()), **options)


def test_the_verifier_holds_appending_passes_to_their_word():
    class Forgets(type(FAST)):
        name = "forgets"
        adds_inputs = False

    gm = traced(*_plain())
    name_joint(gm, {"a": 1})
    run(gm, ScaleLoss(), CheckFiniteAndUnscale())
    with pytest.raises(VerifyError, match="inputs"):
        run(gm, Forgets())

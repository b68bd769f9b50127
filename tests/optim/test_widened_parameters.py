"""``widen=true``: trained half-precision parameters are fp32 while the model is converted; frozen ones stay."""

import copy

import pytest
import torch

import amp_graph
from amp_graph.errors import CaptureError, PolicyError
from tests.by_hand import descend


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).to(dtype)


def batch(seed=0):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps=range(3)):
    for i in steps:
        descend(optimizer, model(batch(i)).float().square().mean())


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-O2"])
@pytest.mark.parametrize("built", ["before", "after"])
def test_it_trains_as_the_model_in_fp32_does(policy, built):
    expected, found = net().float(), net()
    parameters = [*found.parameters()]
    amp_graph.convert(expected, policy)
    train(expected, adamw(expected))
    optimizer = adamw(found) if built == "before" else None
    amp_graph.convert(found, f"{policy},widen=true")
    train(found, optimizer or adamw(found))
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert [id(p) for p in found.parameters()] == [id(p) for p in parameters]
    rounded = {name: value.bfloat16() for name, value in found.state_dict().items() if value.is_floating_point()}
    amp_graph.revert(found)
    assert {t.dtype for t in (*found.parameters(), *found.buffers()) if t.is_floating_point()} == {torch.bfloat16}
    assert all(torch.equal(found.state_dict()[name], value) for name, value in rounded.items())


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_has_stepped_in_bf16_goes_on_in_fp32(fused):
    model = net()
    optimizer = adamw(model, fused=fused)
    model(batch().bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype is torch.bfloat16
    before = optimizer.state[model[0].weight]["exp_avg"].float()
    amp_graph.convert(model, "bf16,widen=true")
    model(batch()).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    found = optimizer.state[model[0].weight]["exp_avg"]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, before * 0.9 + gradient * 0.1, rtol=1e-6, atol=0)


def test_a_step_as_one_graph_widens_too():
    def loss_fn(y):
        return y.float().square().mean()

    expected, found = net().float(), net()
    for model, policy in ((expected, "bf16"), (found, "bf16,widen=true")):
        step = amp_graph.TrainStep(model, loss_fn, adamw(model), policy)
        for i in range(3):
            step(batch(i))
    assert all(torch.equal(found.state_dict()[name], value) for name, value in expected.state_dict().items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16-O2", "bf16-O3"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_resumed_run_equals_the_uninterrupted_one(policy, first):
    """Of checkpoints that are loaded after the conversion, in either order, into an optimizer built before it."""

    def start(steps, loaded=()):
        model = net()
        optimizer = adamw(model)
        amp_graph.convert(model, f"{policy},widen=true")
        for one, state in loaded:
            (model if one == "model" else optimizer).load_state_dict(copy.deepcopy(state))
        train(model, optimizer, steps)
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    saved, state = start(range(3))
    order = [("model", saved), ("optimizer", state)]
    found, theirs = start(range(3, 6), order if first == "model" else order[::-1])
    expected, states = start(range(6))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for i, kinds in states["state"].items():
        assert all(torch.equal(theirs["state"][i][name], value) for name, value in kinds.items())


def test_frozen_halves_stay_beside_trained_fp32_ones():
    model = torch.nn.Sequential(net().requires_grad_(False), torch.nn.Linear(4, 2))
    reference = copy.deepcopy(model).double()
    amp_graph.convert(model, "bf16")
    model(batch()).square().mean().backward()
    reference(batch().double()).square().mean().backward()
    assert amp_graph.report(model).graphs
    assert model[0][0].weight.dtype is torch.bfloat16
    found, exact = model[1].weight.grad.double(), reference[1].weight.grad
    assert (found - exact).norm() < 0.02 * exact.norm()


def test_without_the_word_trained_halves_are_refused_and_the_message_names_it():
    model = torch.nn.Sequential(net(), torch.nn.Linear(4, 2))
    model[0][0].requires_grad_(False)
    with pytest.raises(CaptureError, match=r"4 are in half precision.*\n.*\n.*widen=true'"):
        amp_graph.convert(model, "bf16")
    with pytest.raises(PolicyError, match="widen=true with level O0"):
        amp_graph.Policy.parse("bf16-O0,widen=true")


def test_masters_of_an_optimizer_are_refused_and_nothing_changes():
    model = net()
    amp_graph.MixedPrecisionOptimizer(adamw(model))
    with pytest.raises(CaptureError, match="holds fp32 masters of 6 parameters"):
        amp_graph.convert(model, "bf16,widen=true")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_copies_are_widened_and_narrow_again():
    model = amp_graph.convert(net(), "bf16,widen=true")
    copied = copy.deepcopy(model)
    assert torch.equal(copied(batch()), model(batch()))
    assert {p.dtype for p in amp_graph.revert(copied).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}

"""A step of passes over a graph of the user's own is ``TrainStep``'s, bit for bit; and each pass does what it says."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.optim.torch_fused_update import group_updates
from amp_graph.passes.base import PassError
from amp_graph.passes.loss_scaling import (
    AverageOverRanks,
    CheckFiniteAndUnscale,
    ClipGradients,
    ScaleLoss,
    UpdateLossScale,
    joint_of,
    name_exported,
    name_joint,
)
from amp_graph.passes.loss_scaling.append import StateInput
from amp_graph.passes.manager import run_passes
from amp_graph.passes.step.lay_out_gradients import LayOutGradients
from amp_graph.passes.step.update_parameters import (
    AddUpdateTargets,
    GroupInputs,
    ReturnOutputs,
    UpdateParameters,
    WriteLowCopies,
)
from amp_graph.scaling.loss_scale import LossScale
from tests.layers import layers
from tests.passes.loss_scaling.joint_graphs import exported, traced


@layers(lambda: dict(first=nn.Linear(6, 16), second=nn.Linear(16, 3)))
def Net(self, x, y):
    return F.cross_entropy(self.second(F.gelu(self.first(x))), y)


@layers(lambda net: dict(net=net))
def AsTuple(self, x, y):
    """AOTAutograd takes a tuple that begins with the loss."""
    return (self.net(x, y),)


def batches(count):
    generator = torch.Generator().manual_seed(7)
    for i in range(count):
        x = torch.randn(8, 6, generator=generator)
        yield (x * 1e37 if i == 3 else x), torch.randint(0, 3, (8,), generator=generator)


def passes_of(model, optimizer, scale, clips):
    """The passes of a step by hand, and the tensors of the inputs that they add."""
    names = {id(p): f"net.{name}" for name, p in model.named_parameters()}
    groups, tensors = [], {"loss_scale": scale.state[0]}
    tensors.update(zip(("growth_tracker", "hysteresis_left", "skipped", "stuck"), scale.state[1:], strict=True))
    for n, update in enumerate(group_updates(optimizer, list(model.parameters()))):
        kinds = []
        for kind, held in zip(update.names, update.states, strict=True):
            kinds.append([StateInput(f"{kind}_{n}_{i}_state", t) for i, t in enumerate(held)])
            tensors.update((given.name, given.like) for given in kinds[-1])
        rate = StateInput(f"rate_{n}", torch.tensor(float(update.group["lr"]), dtype=torch.float64))
        tensors[rate.name] = rate.like
        groups.append(GroupInputs(update.apply, [names[id(p)] for p in update.params], rate, kinds))
    passes = [
        ScaleLoss(),
        LayOutGradients(),
        CheckFiniteAndUnscale(),
        ClipGradients(*clips),
        UpdateParameters(tuple(groups)),
        UpdateLossScale(*scale.options()),
        ReturnOutputs(1),
    ]
    return passes, tensors


@pytest.mark.parametrize(
    ("kind", "options", "clips"),
    [
        (torch.optim.AdamW, {"lr": 0.01}, (None, None)),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, (0.5, None)),
        (torch.optim.Adagrad, {"lr": 0.05}, (0.5, 0.01)),
    ],
)
def test_passes_in_a_row_are_a_train_step(kind, options, clips):
    model = Net()
    twin = copy.deepcopy(model)
    scales = [LossScale(2.0**20, growth_interval=4) for _ in range(2)]
    for scale in scales:
        scale.to(torch.device("cpu"))
    theirs = kind(model.parameters(), **options)
    step = amp_graph.TrainStep(model, None, theirs, "O0", loss_scale=scales[0], clip_norm=clips[0], clip_value=clips[1])
    gm, signature = exported(AsTuple(twin), *next(batches(1)))
    name_exported(gm, signature)
    passes, tensors = passes_of(twin, kind(twin.parameters(), **options), scales[1], clips)
    run_passes(gm, passes, checked=True, strict=True)
    state = [tensors[name] for name in joint_of(gm).inputs]
    for x, y in batches(20):
        with torch.no_grad():
            (loss,) = gm(*twin.parameters(), x, y, *state)
        assert torch.equal(step(x, y), loss)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert [t.item() for t in scales[0].state] == [t.item() for t in scales[1].state]
    assert scales[0].state[3] > 0, "one step was skipped"


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def graph(dtype=torch.float32):
    """Forward and backward of one parameter ``w`` in ``dtype``, and the parameter."""
    w = leaf(2, 3, dtype=dtype)
    gm = traced(lambda w: w.float().square().sum(), w)
    (given,) = gm.graph.find_nodes(op="placeholder")
    name_joint(gm, {"w": 1}, parameters={"w": given})
    return gm, w, given.name


def descend(parameters, grads, states, rate, found_inf):
    parameters[0].sub_(grads[0] * rate)


def test_a_master_is_updated_and_rounded_into_its_low_parameter():
    gm, w, given = graph(torch.bfloat16)
    master = w.detach().float() + 1e-4
    rate = StateInput("rate", torch.tensor(0.1, dtype=torch.float64))
    group = GroupInputs(descend, ["w"], rate)
    passes = [
        AddUpdateTargets({"w": StateInput("master", master)}),
        LayOutGradients(),
        UpdateParameters((group,)),
        WriteLowCopies({"w": [given]}),
        ReturnOutputs(1),
    ]
    expected = master - 2 * w.detach().float() * 0.1
    run_passes(gm, passes, checked=True, strict=True)
    with torch.no_grad():
        gm(w, master, rate.like)
    assert torch.equal(master, expected)
    assert torch.equal(w, expected.bfloat16())


def test_gradients_take_the_layout_of_what_is_updated():
    w = leaf(4, 3, 2, 2)
    gm = traced(lambda w: w.square().sum(), w)
    name_joint(gm, {"w": 1})
    like = StateInput("other", torch.empty(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    passes = [AddUpdateTargets({"w": like}), LayOutGradients(), ReturnOutputs(1, gradients=True)]
    run_passes(gm, passes, checked=True, strict=True)
    assert gm(w, like.like)[1].stride() == like.like.stride()


DESCEND = UpdateParameters((GroupInputs(descend, ["w"], StateInput("rate", torch.ones(()))),))
ORDERS = [
    (DESCEND, ClipGradients(norm=1.0)),
    (DESCEND, ScaleLoss()),
    (DESCEND, AverageOverRanks("0", 2)),
    (ClipGradients(norm=1.0), AverageOverRanks("0", 2)),
]


@pytest.mark.parametrize("passes", ORDERS, ids=lambda passes: " before ".join(one.name for one in passes))
def test_what_changes_gradients_is_refused_behind_what_read_them(passes):
    gm, _, _ = graph()
    run_passes(gm, passes[:1])
    nodes = len(gm.graph.nodes)
    with pytest.raises(PassError, match=f"pass {passes[1].name}: {passes[0].name} ran") as found:
        run_passes(gm, passes[1:])
    assert f"{passes[1].name} first, then {passes[0].name}" in str(found.value)
    assert len(gm.graph.nodes) == nodes


@pytest.mark.parametrize(
    ("passes", "match"),
    [
        ((LayOutGradients(), ScaleLoss(), UpdateParameters()), "still scaled"),
        ((UpdateParameters((GroupInputs(None, ["v"], StateInput("rate", torch.ones(()))),)),), "no gradient of v"),
        ((WriteLowCopies({"v": ["arg0_1"]}),), "parameter v"),
    ],
)
def test_what_is_missing_is_an_error_with_its_fix(passes, match):
    gm, _, _ = graph()
    with pytest.raises(PassError, match=match) as found:
        run_passes(gm, passes)
    assert "fix: " in str(found.value)

"""Updates go through memory: parameters, states and gradients that lie otherwise are updated element by element."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_graph
from amp_graph.optim import torch_fused_update
from amp_graph.optim.torch_fused_update import is_dense
from amp_graph.passes.loss_scaling.gradient_layout import laid_out_as
from tests.layers import layers
from tests.step.test_train_step import by_hand

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}
WITH_STATE = [name for name in KINDS if name != "sgd"]
INDUCTOR = pytest.param(
    "inductor",
    marks=pytest.mark.filterwarnings(
        "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
        "ignore:CUTLASS backend is not supported:UserWarning",  # a CUDA build of torch 2.12, also without a GPU
    ),
)
LONG_INDUCTOR = pytest.param(*INDUCTOR.values, marks=[*INDUCTOR.marks, pytest.mark.slow])


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 4))


X, Y = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def step_of(model, optimizer, compile="eager", **options):
    return amp_graph.TrainStep(model, nn.CrossEntropyLoss(), optimizer, "bf16", compile=compile, **options)


def distance(one, two):
    """The greatest distance of two models' parameters, in parts of their size."""
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def resumed(kind, layout, compile):
    """Train, save, load into a model of this layout, and train on."""
    model = images()
    optimizer = kind(model.parameters())
    step = step_of(model, optimizer, compile)
    for _ in range(3):
        step(X, Y)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model = images().to(memory_format=layout)
    optimizer = kind(model.parameters())
    step = step_of(model, optimizer, compile)
    for one, state in zip((model, optimizer), saved, strict=True):
        one.load_state_dict(state)
    for _ in range(3):
        step(X, Y)
    return model


@pytest.mark.onednn  # a convolution of torch's own rounds otherwise in another layout
@pytest.mark.sampled(4)
@pytest.mark.parametrize("compile", ["eager", LONG_INDUCTOR])
@pytest.mark.parametrize("name", WITH_STATE)
def test_state_saved_in_one_layout_goes_on_in_another(name, compile):
    plain, last = (resumed(KINDS[name], f, compile) for f in (torch.contiguous_format, torch.channels_last))
    assert last[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert distance(last, plain) <= 1e-5


def test_state_left_as_it_was_saved_would_go_elsewhere(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(torch_fused_update, "_lies_like", lambda state, parameter: True)
    monkeypatch.setattr(torch_fused_update.GroupUpdate, "_is_for_kernel", lambda *_: True)
    plain, last = (resumed(KINDS["adamw"], f, "eager") for f in (torch.contiguous_format, torch.channels_last))
    assert distance(last, plain) > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WITH_STATE)
def test_a_model_that_changes_its_layout_between_steps_and_changes_it_back(name):
    """The graph of the first layout is there at the end, and its states are no longer the optimizer's."""
    plain, last, found = torch.contiguous_format, torch.channels_last, []
    for layouts in ((plain, plain, plain), (plain, last, plain)):
        model = images()
        step = step_of(model, KINDS[name](model.parameters()))
        for layout in layouts:
            model.to(memory_format=layout)
            for _ in range(2):
                step(X, Y)
        found.append(model)
    assert distance(*found) <= 1e-5


def looped(kind, order, layout, change_at):
    """Train at O2 in a loop by hand under a fused optimizer, and bring the model into ``layout`` before one step."""
    model = images()
    early = kind(model.parameters(), fused=True)
    amp_graph.convert(model, "bf16-O2")
    optimizer = early if order == "optimizer first" else kind(model.parameters(), fused=True)
    if order == "apex":
        optimizer = amp_graph.MixedPrecisionOptimizer(optimizer)
    for step in range(4):
        if step == change_at:
            model.to(memory_format=layout)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        optimizer.backward(loss) if order == "apex" else loss.backward()
        optimizer.step()
    return list(model.state_dict().values())  # the masters


@pytest.mark.onednn
@pytest.mark.sampled(4)
@pytest.mark.parametrize("change_at", [0, 2])
@pytest.mark.parametrize("order", ["optimizer first", "model first", "apex"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_masters_of_a_model_that_changes_its_layout(kind, order, change_at):
    plain, last = (looped(kind, order, f, change_at) for f in (torch.contiguous_format, torch.channels_last))
    for a, b in zip(plain, last, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


@layers(lambda: dict(weight=nn.Parameter(torch.randn(8, 16)[:, ::2]), last=nn.Linear(8, 4)), seed=0)
def Gaps(self, x):
    """With a parameter whose columns are every other one of a larger matrix."""
    return self.last(x @ self.weight)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("compile", ["eager", INDUCTOR])
@pytest.mark.parametrize("name", KINDS)
def test_parameters_with_gaps(name, compile, clip):
    model, plain = Gaps(), Gaps()
    optimizer, theirs = KINDS[name](model.parameters()), KINDS[name](plain.parameters())
    step = amp_graph.TrainStep(model, nn.CrossEntropyLoss(), optimizer, "O0", compile=compile, clip_norm=clip)
    x = X.flatten()[:64].view(8, 8)
    for _ in range(3):
        step(x, Y)
    by_hand(plain, theirs, "O0", [(x, Y)] * 3, clip=clip)
    assert not is_dense(model.weight)
    assert distance(model, plain) <= 1e-5
    assert distance(plain, Gaps()) > 1e-3


def test_gradients_are_copied_only_where_they_lie_otherwise():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    same, other = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(4, 3, 2, 2)
    assert laid_out_as(weight, same) is same
    laid = laid_out_as(weight, other.bfloat16())
    assert laid.stride() == weight.stride()
    assert torch.equal(laid, other.bfloat16())
    assert is_dense(weight)
    assert not is_dense(torch.randn(4, 4)[:, :2])
    assert not is_dense(torch.randn(4, 1).expand(4, 4))
    sparse = torch.eye(3).to_sparse()
    assert not is_dense(sparse)
    assert laid_out_as(torch.eye(3), sparse) is sparse


def test_a_dimension_of_one_is_stepped_along_by_nobody():
    """A 1x1 convolution's gradient in channels_last lies as its weight does; one of 3x3 does not."""
    for size, copied in ((1, False), (3, True)):
        weight = torch.randn(8, 4, size, size)
        grad = torch.empty_strided(weight.shape, (4 * size * size, 1, 4 * size, 4)).copy_(weight)
        assert grad.stride() != weight.stride()
        found = laid_out_as(weight, grad)
        assert (found is not grad) == copied
        assert torch.equal(found.flatten(), torch.as_strided(found, (found.numel(),), (1,)))
        assert torch.equal(found, weight)

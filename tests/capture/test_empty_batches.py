"""Batches without elements, and other sizes of zero: what eager fp32 runs, converted models and steps run, too."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from tests.by_hand import descend, twins
from tests.empty_networks import NETWORKS, inputs_of, network_of

POLICIES = ("bf16", "fp16")


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


@torch.no_grad()
def evaluated(model, inputs):
    """Output, and its strides."""
    out = first(model.eval()(*inputs))
    return [out, torch.tensor(out.stride())]


def trained(model, inputs):
    """Output, gradients of inputs and of parameters, buffers."""
    given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = first(model.train()(*given))
    out.sum().backward()
    grads = [x.grad for x in given if x.is_floating_point()] + [p.grad for p in model.parameters()]
    return [out.detach(), *grads, *model.buffers()]


def stepped(model, inputs, policy=None):
    """The loss of a step, and what it makes of parameters and buffers."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.9)
    if policy is None:
        loss = descend(optimizer, first(model(*inputs)).float().sum())
    else:
        step = amp_graph.TrainStep(model, lambda out: first(out).float().sum(), optimizer, policy, loss_scale=None)
        loss = step(tuple(inputs))
    return [loss.detach(), *(p.detach() for p in model.parameters()), *model.buffers()]


def assert_alike(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02, equal_nan=True)


def check(name, policy, ways=("eval", "train", "step"), layout=torch.contiguous_format):
    inputs = inputs_of(name, layout)
    for way in ways:
        model = network_of(name)
        if layout is torch.channels_last:
            model = model.to(memory_format=layout)
        plain = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's own, of tensors without elements
            if way == "step":
                assert_alike(stepped(model, inputs, policy), stepped(plain, inputs))
            else:
                run = evaluated if way == "eval" else trained
                assert_alike(run(amp_graph.convert(model, policy), inputs), run(plain, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_runs_where_eager_does(name, policy):
    check(name, policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if inputs_of(name)[0].dim() == 4])
def test_a_network_of_images_runs_in_channels_last(name):
    check(name, "bf16", layout=torch.channels_last)


# The inputs of the issue, and neighbours, each of which failed.
FAILED = (
    "conv2d 1x1", "conv2d 1x1 stride", "depthwise", "gru", "interpolate nearest", "mse",
    "group norm of no places",
)  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_what_failed(name):
    check(name, "bf16")


@pytest.mark.parametrize("batches", [(4, 0, 4), (3, 5, 0, 7)])
def test_a_batch_among_others_may_be_empty(batches):
    """Sizes that have become symbols, too."""
    layers = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
    plain, converted = twins(lambda: nn.Sequential(*layers))
    for batch in batches:
        x = torch.randn(batch, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        outs = [m(x) for m in (converted, plain)]
        torch.testing.assert_close(*outs, rtol=0.02, atol=0.05)
        for m, out in zip((converted, plain), outs, strict=True):
            m.zero_grad()
            out.square().sum().backward()
    torch.testing.assert_close(list(converted.buffers()), list(plain.buffers()), rtol=0.02, atol=0.02)


def test_cross_entropy_of_no_rows_is_nan_where_eager_is():
    plain, model = twins(lambda: nn.Linear(16, 32))
    for m in (model, plain):
        loss = F.cross_entropy(m(torch.randn(0, 16)), torch.zeros(0, dtype=torch.int64))
        loss.backward()
        assert loss.isnan()
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], equal_nan=True
    )

"""Functions with a backward of their own: second derivatives."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.backends.cpu.inference.activations import relu_in_place
from amp_graph.passes.casts.low_layer_norm import layer_norm_low
from amp_graph.passes.casts.share_casts import shared_cast

FAST = "bf16,accuracy=fast"


def _norm(x, w, b):
    return layer_norm_low(x, (8,), w[0], b, 1e-5).sin()


def _shared(x, w, b):
    wide, one, two = shared_cast(x.exp(), torch.bfloat16, 2, True)
    return wide.sin() + one * two


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (_norm, lambda x, w, b: F.layer_norm(x, (8,), w[0], b).sin()),
        (_shared, lambda x, w, b: (h := x.exp()).sin() + h.bfloat16() * h.bfloat16()),
    ],
)
def test_second_derivatives(ours, plain):
    def penalty(function):
        x, w, b = (
            torch.randn(4, 8).requires_grad_(),
            torch.randn(8, 8).requires_grad_(),
            torch.randn(8).requires_grad_(),
        )
        first = torch.autograd.grad(function(x, w, b).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.pow(2).sum(), [x, w, b], allow_unused=True)

    torch.manual_seed(0)
    expected = penalty(plain)
    torch.manual_seed(0)
    for a, b in zip(penalty(ours), expected, strict=True):
        if b is None or not b.any():
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("policy", ["bf16", FAST])
def test_a_gradient_penalty_trains(policy):
    def gradients(model):
        x = torch.linspace(-1, 1, 48).view(6, 8).requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model.zero_grad()
        (first.norm(dim=1) - 1).pow(2).mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def make():
        torch.manual_seed(0)
        parts = [torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU()]
        return torch.nn.Sequential(*parts, torch.nn.Linear(32, 256))

    plain, ours = gradients(make()), gradients(amp_graph.convert(make(), policy))
    assert len(plain) == len(ours)
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_relu_on_bits_is_relu_of_every_number_there_is(dtype):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    wanted = every.relu()
    made = relu_in_place(every.clone())
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.nan_to_num(7), wanted.nan_to_num(7))
    assert made.isnan().any()


def test_relu_on_bits_is_in_place_whatever_the_layout():
    x = torch.randn(2, 5, 3, 3).bfloat16().to(memory_format=torch.channels_last)
    wanted = x.relu()
    assert relu_in_place(x) is x
    assert torch.equal(x, wanted)

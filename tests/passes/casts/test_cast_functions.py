"""Functions with a backward of their own: second derivatives."""

import pytest
import torch

import amp_graph
from amp_graph.passes.backends.cpu.inference.activations import relu_in_place

FAST = "bf16,accuracy=fast"


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
    assert all((a - b).norm() <= 0.1 * b.norm() + 1e-3 for a, b in zip(ours, plain, strict=True))


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

"""Small operations stay torch's own C++ functions, larger ones are rewritten; gradients are autocast's either way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.passes.casts import share_casts
from amp_graph.passes.torch_compat.devices import cpu_has_bf16
from tests.by_hand import step_of
from tests.layers import forward_of, layers

pytestmark = pytest.mark.by_profit
needs_bf16 = pytest.mark.skipif(not cpu_has_bf16(), reason="no rewrite without bf16 instructions")


@layers(lambda: dict(norm=nn.LayerNorm(8), parts=nn.ModuleList(nn.Linear(8, 8) for _ in range(3))))
def Readers(self, x):
    """A norm, whose fp32 result three linears and a sum read."""
    x = self.norm(x)
    return x + sum(part(x) for part in self.parts).float()


@layers(lambda: dict(qkv=nn.Linear(16, 48)))
def Attends(self, x):
    """Attention of a few tokens, whose projections are one linear."""
    q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)


@forward_of(nn.LSTM)
def Recurs(self, x):
    """An LSTM that returns its output alone."""
    return nn.LSTM.forward(self, x)[0]


CASES = {
    "a linear of 4 rows": (lambda: nn.Linear(32, 32), (4, 32)),
    "linears and GELUs": (lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), (4, 32)),
    "readers of one cast": (Readers, (4, 8)),
    "attention of few tokens": (Attends, (1, 2, 16)),
    "an LSTM of few steps": (lambda: Recurs(32, 32), (4, 2, 32)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 8, 3)), (1, 32, 4, 4)),
}


def trained(model, x, autocast=False):
    """The gradients of the input and of all parameters."""
    x, context = x.clone().requires_grad_(), torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    _, *grads = step_of(model, x, loss=lambda out: out.float().square().mean(), context=context)
    return [x.grad, *grads]


def own_calls(model):
    """The names of amp_graph's functions in the last graph of a model."""
    graph = conversion_of(model).graphs[-1].rewritten.gm.graph
    return {n.target.__name__ for n in graph.nodes if getattr(n.target, "__module__", "").startswith("amp_graph.")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.onednn] * ("LSTM" in n)) for n in CASES])
def test_small_operations_call_no_function_of_ours(name):
    build, shape = CASES[name]
    made, x = build(), torch.randn(shape)
    expected = trained(made, x, autocast=True)
    made.zero_grad()
    found = trained(amp_graph.convert(made, "bf16", strict=True), x)
    assert own_calls(made) == set()
    for ours, autocasts in zip(found, expected, strict=True):
        assert torch.allclose(ours, autocasts, rtol=0.02, atol=0.02 * autocasts.abs().max().item())


@needs_bf16
def test_a_linear_that_a_library_would_run_is_ours():
    model = amp_graph.convert(nn.Linear(32, 32), "bf16", strict=True)
    trained(model, torch.randn(5, 32))
    assert own_calls(model) == {"linear_low"}


def test_gradients_of_one_cast_per_reader_are_summed_in_fp32(monkeypatch):
    """As those of the shared cast, in another order; sums in bf16 would differ by a thousand times as much."""
    model, x = Readers(), torch.randn(4, 8)
    apart = trained(amp_graph.convert(model, "bf16"), x)
    assert "shared_cast" not in own_calls(model)
    amp_graph.revert(model).zero_grad()
    monkeypatch.setattr(share_casts, "FEWEST_SHARED", 0)
    shared = trained(amp_graph.convert(model, "bf16"), x)
    assert "shared_cast" in own_calls(model)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(apart, shared, strict=True))

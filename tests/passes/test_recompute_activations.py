"""A linear that computes its input again: the same bits, one saved tensor less, and second derivatives."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.manager import run_passes
from amp_graph.passes.recompute_activations import RecomputeActivations
from amp_graph.passes.runtime import ACTIVATIONS, layer_norm_low, linear_of_activation, shared_cast
from tests.passes.graphs import capture_function, differences, passes_before, run_step

FAST = "bf16,accuracy=fast"
X = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)) / 3
V = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)) / 3
B = torch.randn(4, generator=torch.Generator().manual_seed(4))

RECOMPUTED = {
    "gelu": lambda s, x: F.linear(F.gelu(F.linear(x, s.w)), s.v, s.b),
    "gelu tanh": lambda s, x: F.linear(F.gelu(F.linear(x, s.w), approximate="tanh"), s.v, s.b),
    "silu": lambda s, x: F.linear(F.silu(F.linear(x, s.w)), s.v),
    "conv1d of gpt2": lambda s, x: torch.addmm(s.b, F.gelu(F.linear(x, s.w)).view(-1, 16), s.v.t()).view(6, 5, 4),
}


def in_autocast(s, x):
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(F.gelu(F.linear(x, s.w)), s.v)


KEPT = {
    "inside the user's autocast": in_autocast,
    "two readers": lambda s, x: F.linear(h := F.gelu(F.linear(x, s.w)), s.v) + h.sum(),
    "relu, which saves its result": lambda s, x: F.linear(F.relu(F.linear(x, s.w)), s.v),
    "written before": lambda s, x: F.linear(F.gelu(F.linear(x, s.w).mul_(2)), s.v),
    "written after": lambda s, x: F.linear(F.gelu(F.linear(x, s.w)).mul_(2), s.v),
    "scaled addmm": lambda s, x: torch.addmm(s.b, F.gelu(F.linear(x, s.w)).view(-1, 16), s.v.t(), beta=2),
    "other rows": lambda s, x: F.linear(F.gelu(F.linear(x, s.w)).view(-1, 8), s.w),
}


def recomputed(function, x=X, narrowest=1):
    graph = capture_function(function, x, w=W, v=V, b=B)
    plain, ours = (graph.through(passes_before(RecomputeActivations, FAST))[0] for _ in range(2))
    (done,) = run_passes(ours, [RecomputeActivations(narrowest)], checked=True)
    return plain, ours, graph.given, done.result.changes


def saved(gm, given):
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
        out = gm(*given)
    return sum(t.numel() * t.itemsize for t in seen.values()), out


@pytest.mark.parametrize("name", RECOMPUTED)
def test_no_bit_changes_and_one_tensor_less_is_saved(name):
    plain, ours, given, changes = recomputed(RECOMPUTED[name])
    assert len(changes) == 1
    assert not differences(run_step(ours, given), run_step(plain, given))
    assert saved(plain, given)[0] - saved(ours, given)[0] == 6 * 5 * 16 * 2


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_alone(name):
    plain, ours, given, changes = recomputed(KEPT[name])
    assert not changes
    assert not differences(run_step(ours, given), run_step(plain, given))


def test_a_narrow_linear_is_left_alone():
    assert not recomputed(RECOMPUTED["gelu"], narrowest=5)[3]
    assert recomputed(RECOMPUTED["gelu"], narrowest=4)[3]


def test_control_another_activation_is_seen(monkeypatch):
    plain, ours, given, _ = recomputed(RECOMPUTED["gelu"])
    monkeypatch.setitem(ACTIVATIONS, "gelu", lambda x: F.gelu(x, approximate="tanh"))
    assert differences(run_step(ours, given), run_step(plain, given))


def test_without_gradients_nothing_is_kept():
    x = torch.randn(3, 8)
    with torch.no_grad():
        out = linear_of_activation(F.gelu(x), W, None, x, "gelu")
    assert out.grad_fn is None
    assert torch.equal(out, F.linear(F.gelu(x), W))


def _linear(x, w, b):
    return linear_of_activation(F.gelu(x), w, b, x, "gelu").sin()


def _norm(x, w, b):
    return layer_norm_low(x, (8,), w[0], b, 1e-5).sin()


def _shared(x, w, b):
    wide, one, two = shared_cast(x.exp(), torch.bfloat16, 2, True)
    return wide.sin() + one * two


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (_linear, lambda x, w, b: F.linear(F.gelu(x), w, b).sin()),
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
        return torch.nn.Sequential(*parts, torch.nn.Linear(32, 1))

    plain, ours = gradients(make()), gradients(amp_graph.convert(make(), policy))
    assert len(plain) == len(ours)
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-3

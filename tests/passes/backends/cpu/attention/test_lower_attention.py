"""The pass that calls attention in compiled C: where it applies, and models and steps that train through it."""

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.backends.cpu.attention.lower_attention import Attention
from amp_graph.passes.graph import call_arguments
from amp_graph.passes.manager import run_passes
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import drawn
from tests.passes.graphs import (
    assert_left_alone,
    assert_near,
    capture_function,
    passes_before,
    run_step,
    with_and_without,
)
from tests.relative_error import errors

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs a CPU with AVX512_BF16, and a C compiler")


def attend(s, x, **options):
    q, k, v = (t.view(2, 16, 4, 8).transpose(1, 2) for t in F.linear(x, s.w).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


X, W = drawn(2, 16, 32, seed=1), drawn(96, 32, seed=2) / 4


def passed(function, x=X, policy="bf16", **state):
    return with_and_without(Attention(), capture_function(function, x, w=W, **state), policy)


PASSED = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(16, 16).tril().bool()},
    "dropout": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("name", PASSED)
def test_the_pass(name):
    plain, ours, given, result = passed(lambda s, x: attend(s, x, **PASSED[name]))
    assert [c.action for c in result.changes] == ["own kernel"]
    assert any(n.target is attention_low for n in ours.graph.nodes)
    assert_near(run_step(ours, given), run_step(plain, given), 0.01)


def test_the_rule_is_about_the_machine(monkeypatch):
    monkeypatch.setattr(call_arguments, "cpu_has_bf16", lambda: False)
    found = passed(attend)
    assert_left_alone(found)
    assert "no kernel of ours is faster" in found.result.skips[0].reason


@layers(lambda: dict(projected=torch.nn.Linear(32, 96), bias=torch.nn.Parameter(drawn(4, 16, 16, seed=3))), seed=0)
def Biased(self, x):
    """With a bias of scores that is learned, as Swin and T5 have."""
    q, k, v = (t.view(2, 16, 4, 8).transpose(1, 2) for t in self.projected(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, self.bias[None].to(q.dtype)).transpose(1, 2).flatten(2)


def gradients_of(model):
    return step_of(model, X.to(model.bias.dtype), loss=lambda out: out.square().sum())[1:]


def test_models_whose_bias_is_learned():
    """Called, and as a step, whose update shows its gradients."""
    exact, plain = gradients_of(Biased().double()), amp_graph.convert(Biased(), "bf16,skip=attention")
    found = gradients_of(amp_graph.convert(Biased(), "bf16"))
    pairs = zip(errors(found, exact), errors(gradients_of(plain), exact), strict=True)
    assert max(ours / theirs for ours, theirs in pairs) <= 1.1
    model = Biased()
    step = amp_graph.TrainStep(model, lambda y: y.square().sum(), torch.optim.SGD(model.parameters(), 1.0), "bf16")
    step(X)
    assert "attention_backward_with_mask" in step.graph_text()
    for before, after, grad in zip(Biased().parameters(), model.parameters(), found, strict=True):
        assert (before - after - grad).norm() <= 1e-4 * grad.norm()


FEW = [(2, 1, 16, False), (1, 4, 16, False)]
MORE = [(1, 4, 32, False), (2, 12, 4, False), (2, 1, 16, True)]


@pytest.mark.parametrize(("sizes", "ours"), [*((s, False) for s in FEW), *((s, True) for s in MORE)])
def test_few_scores_without_gradients_stay_with_torch(sizes, ours):
    *shape, trains = sizes
    given = [drawn(*shape, 16, seed=i).requires_grad_(trains) for i in range(3)]
    with torch.set_grad_enabled(trains):
        graph = capture_function(lambda s, q, k, v: F.scaled_dot_product_attention(q, k, v), *given)
        (done,) = run_passes(graph.through(passes_before(Attention))[0], [Attention()], checked=True)
    assert [c.action for c in done.result.changes] == ["own kernel"] * ours
    assert ours or "so few scores" in done.result.skips[0].reason

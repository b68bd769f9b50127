"""Attention: results and gradients no further from fp64 than those of torch's kernel."""

import functools

import pytest
import torch
import torch.nn.functional as F

import amp_graph
from amp_graph.passes.backends.cpu.attention import attention_kernel as kernel
from amp_graph.passes.backends.cpu.attention.attention_functions import attention_low
from amp_graph.passes.backends.cpu.attention.lower_attention import Attention
from amp_graph.passes.graph import call_arguments
from amp_graph.passes.manager import run_passes
from amp_graph.passes.torch_compat import autograd
from tests.by_hand import step_of
from tests.layers import layers
from tests.passes.drawn import differentiated, drawn
from tests.passes.graphs import (
    BF16,
    assert_left_alone,
    assert_near,
    capture_function,
    passes_before,
    run_step,
    with_and_without,
)
from tests.passes.whole_steps import stepped
from tests.relative_error import errors

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="needs a CPU with AVX512_BF16, and a C compiler")


BATCH, HEADS, LENGTH, KEYS, WIDTH = 3, 4, 32, 40, 16


SEEN = drawn(BATCH, 1, LENGTH, KEYS, seed=7) > -0.5
FORMS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "grouped heads": {"enable_gqa": True, "is_causal": True},
    "bool mask": {"attn_mask": SEEN},
    "bool mask of rows": {"attn_mask": SEEN[:, :, :1]},
    "bool mask of two dimensions": {"attn_mask": SEEN[0, 0]},
    "float mask": {"attn_mask": drawn(BATCH, HEADS, LENGTH, KEYS, seed=8)},
    "low float mask": {"attn_mask": drawn(1, HEADS, LENGTH, KEYS, seed=8).bfloat16()},
    "rows that see nothing": {"attn_mask": SEEN & (drawn(BATCH, 1, LENGTH, 1, seed=9) > 0)},
}


def operands(name, size=1.0):
    heads = 2 if name == "grouped heads" else HEADS
    shapes = [(BATCH, HEADS, LENGTH, WIDTH), (BATCH, heads, KEYS, WIDTH), (BATCH, heads, KEYS, WIDTH)]
    return [drawn(*shape, seed=i) * (size if i < 2 else 1) for i, shape in enumerate(shapes)]


def in_fp64(options):
    """The options with a mask of fp64 where it is one of numbers."""
    return {k: v.double() if k == "attn_mask" and v.is_floating_point() else v for k, v in options.items()}


def step(function, given, dtype, **options):
    options = in_fp64(options) if dtype == torch.float64 else options
    return differentiated(functools.partial(function, **options), given, dtype, like=torch.float32)


def compared(name, size=1.0):
    """The kernel's results, ours, and the ratio of the errors of each against fp64."""
    given = operands(name, size)
    exact = step(F.scaled_dot_product_attention, given, torch.float64, **FORMS[name])
    torchs = step(F.scaled_dot_product_attention, given, BF16, **FORMS[name])
    ours = step(attention_low, given, BF16, **FORMS[name])
    return torchs, ours, [a / b for a, b in zip(errors(ours, exact), errors(torchs, exact), strict=True)]


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", FORMS)
def test_results_and_gradients_are_as_exact_as_the_kernels(name, size):
    torchs, ours, ratios = compared(name, size)
    assert [t.shape for t in ours] == [t.shape for t in torchs]
    assert [t.dtype for t in ours] == [t.dtype for t in torchs]
    assert ours[0].stride() == torchs[0].stride()
    assert max(ratios) <= 1.1, ratios


def test_one_head_of_keys_for_all():
    """Which torch's kernel does not take: its formula, in products, runs for that."""
    q, k, v = (drawn(BATCH, heads, 24, WIDTH, seed=i) for i, heads in enumerate((HEADS, 1, 1)))
    wide = [t.to(BF16).double().requires_grad_() for t in (q, k, v)]
    F.scaled_dot_product_attention(*wide).sum().backward()
    low = [t.to(BF16).requires_grad_() for t in (q, k, v)]
    out = attention_low(*low)
    assert "Attention" in out.grad_fn.name()
    out.sum().backward()
    for one, other in zip(low, wide, strict=True):
        assert (one.grad - other.grad).norm() <= 0.02 * other.grad.norm()


@pytest.mark.parametrize("kind", [torch.float32, BF16])
@pytest.mark.parametrize("shape", [(1, HEADS, LENGTH, KEYS), (BATCH, 1, 1, KEYS), (LENGTH, KEYS)])
def test_masks_that_train(kind, shape):
    given, mask, grad = operands("plain"), drawn(*shape, seed=8).to(BF16), drawn(BATCH, HEADS, LENGTH, WIDTH, seed=5)

    def gradients(function, dtype, masked):
        inside = [*(t.to(dtype).requires_grad_() for t in given), mask.to(masked).requires_grad_()]
        out = function(*inside)
        first = torch.autograd.grad(out, inside, grad.to(dtype), create_graph=True)
        second = torch.autograd.grad(sum(g.double().square().sum() for g in first), inside)
        return torch.autograd.grad(function(*inside), inside, grad.to(dtype)), second

    exact = gradients(F.scaled_dot_product_attention, torch.float64, torch.float64)
    found = gradients(attention_low, BF16, kind)
    assert found[0][3].dtype == kind
    assert max(errors(found[0], exact[0])) < 0.005
    assert max(errors(found[1], exact[1])) < 0.03


def seeded(function):
    """A function, and what is drawn behind it."""

    def call(*given, **options):
        torch.manual_seed(11)
        return function(*given, **options)

    return call


@pytest.mark.parametrize("name", FORMS)
def test_dropout_draws_as_torchs(name):
    """Torch computes it in fp32, with a rounding at the end."""
    given, following = operands(name), []
    exact = step(seeded(F.scaled_dot_product_attention), given, torch.float64, dropout_p=0.2, **FORMS[name])
    following.append(torch.rand(3))
    ours = step(seeded(attention_low), given, BF16, dropout_p=0.2, **FORMS[name])
    following.append(torch.rand(3))
    assert max(errors(ours, exact)) < 0.005
    assert torch.equal(*following)
    with torch.no_grad():
        given = [t.bfloat16() for t in given]
        assert torch.equal(seeded(attention_low)(*given, dropout_p=0.2, **FORMS[name]), ours[0])


def test_control_a_forgotten_scale_is_seen(monkeypatch):
    backward = kernel.backward
    monkeypatch.setattr(kernel, "backward", lambda *given: backward(*given[:6], 1.0, *given[7:]))
    assert max(compared("plain")[2]) > 2


def test_an_added_mask_that_no_kernel_of_ours_takes_trains_by_the_formula(monkeypatch):
    """Torch's kernel saves the log-sum-exp of a row alone: of a row that sees nothing, the scores are lost."""
    monkeypatch.setattr(kernel, "takes", lambda *given: False)
    mask = torch.zeros(LENGTH, KEYS).masked_fill(drawn(LENGTH, 1) > 0, torch.finfo(BF16).min)

    exact = step(
        lambda q, k, v: (q @ k.mT * WIDTH**-0.5 + mask.double()).softmax(-1) @ v, operands("plain"), torch.float64
    )
    torchs = step(F.scaled_dot_product_attention, operands("plain"), BF16, attn_mask=mask.to(BF16))
    ours = step(attention_low, operands("plain"), BF16, attn_mask=mask.to(BF16))
    assert max(errors(ours, exact)) < 0.01
    assert max(errors(torchs, exact)) > 0.05


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_second_derivatives(name, p):
    def penalty(function, dtype):
        given = [t.to(dtype).requires_grad_() for t in operands(name)]
        options = in_fp64(FORMS[name]) if dtype == torch.float64 else FORMS[name]
        out = seeded(function)(*given, **options, dropout_p=p)
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), given)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = penalty(F.scaled_dot_product_attention, torch.float64)
    assert max(errors(penalty(attention_low, BF16), exact)) < 0.03


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
    found = [(seeded(run_step)(graph, given), torch.rand(3)) for graph in (ours, plain)]
    assert_near(found[0][0], found[1][0], 0.01)
    assert torch.equal(found[0][1], found[1][1]), "what is drawn behind it"


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


def test_the_whole_step_traces_it_as_one_node():
    made = functools.partial(torch.nn.TransformerEncoderLayer, 32, 4, 64, dropout=0.0, batch_first=True)
    (first, second), _, text = stepped(made, lambda y: y.float().square().mean(), [(X,)] * 2)
    assert first.isfinite()
    assert second < first
    assert text.count("attention_backward") == 1


def test_tensors_that_stand_for_others_go_to_torch(monkeypatch):
    """Wrapper subclasses have no memory of their own; calls inside of transforms are torch's, too."""
    seen = []
    monkeypatch.setattr(autograd, "is_wrapper", lambda t: True)
    monkeypatch.setattr(kernel, "forward", lambda *a: seen.append(a))
    given = [t.bfloat16() for t in operands("plain")]
    assert torch.equal(attention_low(*given), F.scaled_dot_product_attention(*given))
    assert not seen


FEW = [(2, 1, 16, False), (1, 4, 16, False)]
MORE = [(1, 4, 32, False), (2, 12, 4, False), (2, 1, 16, True)]


@pytest.mark.parametrize(("sizes", "ours"), [*((s, False) for s in FEW), *((s, True) for s in MORE)])
def test_few_scores_without_gradients_stay_with_torch(sizes, ours):
    batch, heads, length, trains = sizes
    given = [drawn(batch, heads, length, WIDTH, seed=i).requires_grad_(trains) for i in range(3)]
    with torch.set_grad_enabled(trains):
        graph = capture_function(lambda s, q, k, v: F.scaled_dot_product_attention(q, k, v), *given)
        (done,) = run_passes(graph.through(passes_before(Attention))[0], [Attention()], checked=True)
    assert [c.action for c in done.result.changes] == ["own kernel"] * ours
    assert ours or "so few scores" in done.result.skips[0].reason

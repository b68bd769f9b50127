"""Inputs, buffers and states in half precision beside fp32 parameters: they run as under autocast, in either dtype."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import amp_graph
from amp_graph.capture.conversion import conversion_of
from amp_graph.errors import AmpGraphWarning
from amp_graph.passes.casts import widen_halves
from tests.by_hand import descend
from tests.layers import forward_of, layers
from tests.passes.planning import machine

BF16, FP16 = torch.bfloat16, torch.float16
POLICY = {BF16: "bf16", FP16: "fp16"}


@layers(
    lambda: dict(
        a=nn.Linear(8, 16),
        norm=nn.LayerNorm(16),
        b=nn.Linear(16, 4, bias=False),
        table=nn.Buffer(torch.randn(8, 8) / 3),
    ),
    tail=lambda self, h: self.b(torch.tanh(self.norm(h))),  # smooth, so that no rounding flips a gradient
)
def Net(self, x):
    """Two linears, the second without a bias, around what a subclass does."""
    return self.tail(self.a(x))


# The fake of its product has the dtype of its input.
NoBias = layers(lambda: dict(a=nn.Linear(8, 16, bias=False)), base=Net)(Net.forward)


@forward_of(Net)
def OfBuffer(self, x):
    return self.tail(self.a(x.float() @ self.table))


@forward_of(Net)
def Nested(self, batch, *, scale):
    return self.tail(self.a(batch["x"][0] + batch["x"][1])) * scale


# Fakes of it refuse operands of two dtypes, so no graph is captured in fp32.
@layers(lambda: dict(a=nn.Conv1d(8, 16, 1)), base=Net)
def Conv(self, x):
    return self.tail(self.a(x[:, :, None]).mean(-1))


@forward_of(Net)
def Attention(self, x):
    q = F.linear(x, self.a.weight[:8])[:, None]
    return self.tail(self.a(F.scaled_dot_product_attention(q, x[:, None], x[:, None])[:, 0]))


@layers(lambda: dict(layer=nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)), base=Net)
def Encoder(self, x):
    return self.tail(self.a(self.layer(x[:, None])[:, 0]))


@layers(lambda: dict(cell=nn.GRUCell(8, 16)), base=Net)
def Gru(self, x, *, scale):
    return self.tail(self.cell(x.float(), scale))


@forward_of(Net)
def Cond(self, x):
    return self.tail(torch.cond(x.sum() > 0, lambda y: self.a(y).tanh(), lambda y: self.a(y).relu(), (x,)))


@forward_of(Net)
def Checkpointed(self, x):
    return torch.utils.checkpoint.checkpoint(lambda x: self.tail(self.a(x)), x, use_reentrant=False)


@forward_of(Net)
def Broken(self, x):
    h = self.a(x) + (x @ x.t()).mean()
    torch._dynamo.graph_break()
    return self.tail(h)


@forward_of(Net)
def Loss(self, x):
    return F.mse_loss(x, self.tail(self.a(x)).repeat(1, 2))  # its backward refuses two dtypes


MODELS = [Net, NoBias, OfBuffer, Nested, Conv, Attention, Encoder, Gru, Cond, Checkpointed, Broken, Loss]


def batch_for(kind, dtype):
    g = torch.Generator().manual_seed(0)
    x, h = (torch.randn(3, n, generator=g).to(dtype) for n in (8, 16))
    if kind is Nested:
        return ({"x": (x, x.flip(0))},), {"scale": h[0, :4]}
    return (x,), {"scale": h} if kind is Gru else {}


def rewritten(model, policy):
    args, kwargs = batch_for(type(model), FP16 if policy == "bf16" else BF16)
    return amp_graph.rewrite(torch.export.export(model, args, kwargs).module(), policy)


WAYS = {
    "convert": amp_graph.convert,
    "a module in fp32": lambda model, policy: amp_graph.convert(model, f"{policy},keep_fp32=a|cell|layer"),
    "emulating": lambda model, policy: amp_graph.convert(model, f"{policy},emulate=cuda"),
    "a compiler": lambda model, policy: torch.compile(model, backend="amp_graph", options={"policy": policy}),
    "rewrite": rewritten,
}
# torch itself captures no graph of these, or only one as written in fp32 by the policy.
UNCAPTURED = [(way, kind) for way in ("a compiler", "rewrite", "emulating") for kind in (Conv, Attention)]
CASES = [
    (way, kind, dtype, policy)
    for way in WAYS
    for kind in MODELS
    for dtype, policy in ((FP16, BF16), (BF16, FP16), (BF16, BF16))
    if (way, kind) not in [*UNCAPTURED, ("rewrite", Broken)] and (way == "convert" or (dtype, policy) == (FP16, BF16))
]


def errors(run, model, kind, dtype):
    """Return the relative errors of output and gradients, of the largest, against fp32."""
    args, kwargs = batch_for(kind, dtype)
    wide = copy.deepcopy(model).float()
    exact = wide(*tree_map(torch.Tensor.float, args), **tree_map(torch.Tensor.float, kwargs))
    exact.square().sum().backward()
    out = run(*args, **kwargs)
    out.float().square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), wide.parameters(), strict=True) if q.grad is not None]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in [(out, exact), *pairs])


def fresh(kind, dtype):
    torch.manual_seed(1)
    model = kind()
    model.table = model.table.to(dtype)
    return model


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
@pytest.mark.parametrize(("way", "kind", "dtype", "policy"), CASES)
def test_a_half_input_runs_as_under_autocast(way, kind, dtype, policy):
    wanted = fresh(kind, dtype)
    known = errors(torch.autocast("cpu", policy)(wanted), wanted, kind, dtype)
    model = fresh(kind, dtype)
    assert errors(WAYS[way](model, POLICY[policy]), model, kind, dtype) < max(1.5 * known, 0.01)


@pytest.mark.parametrize("kind", [NoBias, Conv])
def test_a_frozen_model_takes_them_too(kind):
    model = fresh(kind, FP16).eval()
    args, _ = batch_for(kind, FP16)
    with torch.no_grad():
        exact = model(args[0].float())
        found = amp_graph.freeze(amp_graph.convert(model, "bf16"))(*args)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("kind", [NoBias, Conv, Checkpointed])
def test_a_step_takes_them_too(kind):
    model, wanted = fresh(kind, FP16), fresh(kind, FP16)
    args, _ = batch_for(kind, FP16)
    step = amp_graph.TrainStep(
        model, lambda out: out.float().square().mean(), torch.optim.SGD(model.parameters(), 0.1), policy="bf16"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind is Conv else "error", AmpGraphWarning)
        losses = [step(*args) for _ in range(3)]
    optimizer = torch.optim.SGD(wanted.parameters(), 0.1)
    for found in losses:
        loss = descend(optimizer, wanted(args[0].float()).square().mean())
        assert abs(loss - found) < 0.02 * loss


@pytest.mark.by_profit
@pytest.mark.filterwarnings("ignore:amp_graph:amp_graph.errors.AmpGraphWarning")
def test_a_graph_left_in_fp32_takes_them_at_each_call(monkeypatch):
    monkeypatch.setattr("amp_graph.passes.precision.plan_precision.machine_for", lambda device: machine("cpu_bf16"))
    model = fresh(Net, FP16)
    converted = amp_graph.convert(copy.deepcopy(model), "auto")
    for size in (3, 3, 5, 5):
        x = torch.randn(size, 8)
        assert torch.equal(converted(x.half()), model(x.half().float()))
        assert torch.equal(converted(x), model(x))
    assert conversion_of(converted).runs


def test_without_the_pass_they_fail(monkeypatch):
    monkeypatch.setattr(widen_halves, "_to_widen", lambda *given: [])
    args, _ = batch_for(Net, FP16)
    with pytest.raises(RuntimeError, match="same dtype"):
        amp_graph.convert(Net(), "bf16")(*args)

"""Functional transforms, other modes of differentiation, and what PyTorch does differently in inference."""

import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.errors import AmpGraphWarning, CaptureError
from tests.by_hand import twins
from tests.layers import forward_of, layers
from tests.measure import products

BF16 = torch.bfloat16
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


@layers(lambda: dict(net=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))))
def Force(self, x):
    return torch.func.grad(lambda v: self.net(v).sum())(x)


@layers(lambda: dict(linear=nn.Linear(16, 16)))
def OfIntermediate(self, x):
    """A low-precision value meets a transform."""
    return self.linear(torch.func.grad(lambda a: (a @ a.T).sum())(self.linear(x)))


@layers(lambda: dict(linear=nn.Linear(16, 16), head=nn.Linear(16, 2)))
def Vmapped(self, x):
    return self.head(torch.func.vmap(self.linear)(x))


@layers(lambda: dict(linear=nn.Linear(16, 4)))
def Tangent(self, x):
    return torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Force, OfIntermediate, Vmapped, Tangent])
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_inside_of_a_model(kind, policy, monkeypatch):
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    plain, ours = twins(kind, policy, strict=True)
    expected, found = plain(X), ours(X)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    for out in (found, expected):
        out.pow(2).sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or (a.grad - b.grad).norm() <= 0.05 * b.grad.norm() + 1e-6


@pytest.mark.parametrize("call", [lambda m: torch.func.grad(lambda v: m(v).sum())(X), lambda m: torch.func.vmap(m)(X)])
@pytest.mark.parametrize("captured_before", [False, True])
def test_a_call_inside_of_a_transform_is_said_and_forgotten(call, captured_before):
    plain, ours = twins(mlp)
    if captured_before:
        ours(X)
    with pytest.warns(AmpGraphWarning, match="inside a torch.func transform"):
        assert torch.equal(call(ours), call(plain))
    for x in (X, X[:5]):
        assert not torch.equal(ours(x), plain(x)), "captured, in bf16"


def test_a_backward_hook_that_is_gone_is_forgotten():
    plain, ours = twins(mlp)
    ours(X)
    handle = ours[0].register_full_backward_hook(lambda *a: None)
    with pytest.warns(AmpGraphWarning, match="nothing was captured"):
        ours(X)
    handle.remove()
    assert not torch.equal(ours(X), plain(X))


@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
def test_gradients_in_batches(policy):
    plain, ours = twins(mlp, policy)

    def jacobian(model):
        y = model(X)
        return torch.autograd.grad(y, model[0].weight, torch.eye(32).view(32, 8, 4), is_grads_batched=True)[0]

    expected = jacobian(plain)
    assert (jacobian(ours) - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
def test_forward_mode(policy):
    plain, ours = twins(mlp, policy)

    def tangent(model):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent

    expected = tangent(plain)
    assert (tangent(ours) - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", ["", "padding", "causal"])
def test_the_inference_path_of_a_transformer_encoder(norm_first, mask):
    def build():
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, activation="gelu")
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    plain, ours = twins(build, strict=True)
    x, padded = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool)
    padded[0, 3:] = True
    given = {"padding": {"src_key_padding_mask": padded}, "causal": {"mask": torch.ones(5, 5).triu(1).bool()}}
    seen = ~padded if mask == "padding" else torch.ones_like(padded)
    with torch.no_grad():
        exact = plain.double()(x.double(), **given.get(mask, {}))[seen]
        plain.float()
        with torch.autocast("cpu", BF16):
            theirs = plain(x, **given.get(mask, {}))[seen]
        found = ours(x, **given.get(mask, {}))[seen]
    linears = [line for line in amp_graph.report(ours).graphs[0].text.splitlines() if " = linear" in line]
    assert len(linears) == 8
    assert all(": bf16[" in line for line in linears)
    assert (found - exact).norm() <= 1.15 * (theirs - exact).norm()


@forward_of(nn.Module)
def Prints(self, x):
    print(end="")
    return x


@layers(lambda: dict(body=nn.Sequential(nn.Linear(16, 16), Prints(), nn.Linear(16, 16)), head=nn.Linear(16, 2)))
def Broken(self, x):
    return self.head(self.body(x))


def test_a_part_that_escaped_capture_is_said_with_its_parameters():
    match = r"no graph reads 4 parameters \(body.0.weight, body.0.bias, body.2.weight, and 1 more\)"
    with pytest.warns(AmpGraphWarning, match=match + ".* in fp32"):
        amp_graph.convert(Broken(), "bf16,deny=gelu")(X)
    with pytest.raises(CaptureError, match=match):
        amp_graph.convert(Broken(), strict=True)(X)
    model = amp_graph.convert(Broken())  # in mixed precision, so that a line in the report is enough
    model(X)
    assert any(re.search(match + ".* under torch.autocast", note) for note in amp_graph.report(model).notes)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_buffers_that_forward_writes(reentrant):
    @layers(lambda: dict(block=nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())))
    def Net(self, x):
        return checkpoint(self.block, x, use_reentrant=reentrant)

    plain, ours = twins(Net)
    for model in (plain, ours):
        model(torch.ones(2, 3, 8, 8, requires_grad=True)).sum().backward()
    assert ours.block[1].num_batches_tracked == plain.block[1].num_batches_tracked
    assert (ours.block[1].running_mean - plain.block[1].running_mean).norm() < 1e-2


def test_a_module_with_a_wish():
    model = nn.Sequential(nn.Linear(16, 16), amp_graph.precision("full")(nn.Linear(16, 16)), nn.Linear(16, 4))
    amp_graph.convert(model, "bf16")(X)
    assert products(model, X) == [BF16, torch.float32, BF16]
    assert "amp_graph.precision" in amp_graph.report(model).text()

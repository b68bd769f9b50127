"""Whole models that compute activations again: what they save against torch.autocast, and that no gradient changes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_graph
from amp_graph.passes.backends.cpu.norm import fuse_batch_norm_relu
from amp_graph.passes.memory import recompute_activations
from tests.by_hand import descend
from tests.corpus.vision import Bottleneck
from tests.layers import layers
from tests.measure import saved_bytes
from tests.passes.whole_steps import stepped

WITHOUT = ",skip=recompute_activations"
FUSED = partial(torch.optim.SGD, lr=0.1, fused=True)


def resnet():
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    stages = [
        Bottleneck(16, 16, 1, 4),
        *(Bottleneck(64, 16, 1, 4) for _ in range(3)),
        Bottleneck(64, 32, 2, 4),
        Bottleneck(128, 32, 1, 4),
    ]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


@layers(
    lambda width=128, heads=2: dict(
        heads=heads,
        norm1=nn.LayerNorm(width),
        norm2=nn.LayerNorm(width),
        qkv=nn.Linear(width, 3 * width),
        proj=nn.Linear(width, width),
        mlp=nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
    )
)
def Layer(self, x):
    """A pre-norm transformer layer."""
    b, t, d = x.shape
    q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(d, -1))
    x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
    return x + self.mlp(self.norm2(x))


@layers(
    lambda: dict(
        patch=nn.Conv2d(3, 256, 8, 8),
        token=nn.Parameter(torch.zeros(1, 1, 256)),
        layers=nn.Sequential(*(Layer(256) for _ in range(2))),
        norm=nn.LayerNorm(256),
        head=nn.Linear(256, 10),
    )
)
def Vit(self, x):
    """Patches, a class token, layers, a head."""
    x = self.patch(x).flatten(2).transpose(1, 2)
    x = self.layers(torch.cat([self.token.expand(len(x), -1, -1), x], 1))
    return self.head(self.norm(x)[:, 0])


# name: (model, the fewest elements of a batch norm that is fused)
RESNETS = {"fused resnet": (resnet, 1), "resnet": (resnet, 1 << 30)}
MODELS = RESNETS | {"vit": (Vit, 1 << 30)}
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def name(monkeypatch, request):
    """Of a model, whose small values are worth computing again."""
    monkeypatch.setattr(fuse_batch_norm_relu, "FEWEST_OF_A_BATCH_NORM", MODELS[request.param][1])
    monkeypatch.setattr(recompute_activations, "MOST_AGAIN", float("inf"))
    monkeypatch.setattr(recompute_activations, "FEWEST_AGAIN", {})
    return request.param


def made(name):
    torch.manual_seed(1)
    return MODELS[name][0]()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "most"), [("bf16", 0.85), ("bf16,recompute=all", 0.75), ("bf16,accuracy=fast", 0.60)]
)
def test_saved_activations_against_autocast(name, policy, most):
    model, plain = amp_graph.convert(made(name), policy), made(name)
    model(IMAGES)
    autocast = saved_bytes(lambda: torch.autocast("cpu", torch.bfloat16)(plain)(IMAGES), plain, weight_copies=False)
    assert saved_bytes(lambda: model(IMAGES), model, weight_copies=False) <= most * autocast


@pytest.mark.parametrize("name", ["vit"], indirect=True)
def test_the_report_says_what_is_not_saved(name):
    """Two bytes an element; a pool's choices are estimated as saved in full."""
    saves = {}
    for policy in ("bf16", "bf16" + WITHOUT):
        model = amp_graph.convert(made(name), policy)
        model(IMAGES)
        saves[policy] = saved_bytes(lambda model=model: model(IMAGES), model, weight_copies=False)
        report = amp_graph.report(model)
        assert ("recomputed, not saved" in report.text()) is (policy == "bf16")
        saves[policy] += report.graphs[0].spared_bytes
    assert saves["bf16"] == saves["bf16" + WITHOUT]


def trained(name, policy, steps=2):
    """Return all that two steps leave, by ``convert``."""
    model = amp_graph.convert(made(name), policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        descend(optimizer, model(IMAGES).square().mean())
    return dict(model.state_dict())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast", "bf16-O2,recompute=all", "fp16,recompute=all"])
def test_training_leaves_the_same_bits(name, policy):
    with_it, without = trained(name, policy), trained(name, policy + WITHOUT)
    assert all(torch.equal(with_it[k], without[k]) for k in without), "running statistics and their counts included"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
def test_a_step_graph_leaves_the_same_bits_and_computes_again_inside(name, policy):
    (_, with_it, text), (_, without, plain) = (
        stepped(partial(made, name), lambda out: out.square().mean(), [(IMAGES,)] * 2, f"{policy}{skip}", FUSED)
        for skip in ("", WITHOUT)
    )
    state = without.state_dict()
    assert all(torch.equal(value, state[k]) for k, value in with_it.state_dict().items())
    again = (
        ("native_batch_norm", "relu_again") if name in RESNETS else ("gelu.default(", "activation_by_table.default(")
    )
    more, fewer = (sum(one.count(name) for name in again) for one in (text, plain))
    assert more > fewer


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", RESNETS, indirect=True)
def test_a_checkpoint_around_the_model_saves_as_little_as_without(name, reentrant):
    """What is computed again inside of a checkpoint is held by nobody outside of it."""
    found = []
    for policy in ("bf16,recompute=all", "bf16" + WITHOUT):
        model = amp_graph.convert(made(name), policy)
        x = IMAGES.clone().requires_grad_()
        for _ in range(2):
            model.zero_grad()
            checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()

        def forward(model=model, x=x):
            return checkpoint(model, x, use_reentrant=reentrant)

        found.append((saved_bytes(forward, model, weight_copies=False), [p.grad for p in model.parameters()]))
    assert found[0][0] <= found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))

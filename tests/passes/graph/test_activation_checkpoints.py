"""Activation checkpointing: really drops activations in eager mode, and gives the gradients it should."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import amp_graph
from tests.by_hand import step_of
from tests.layers import forward_of, layers
from tests.measure import DtypeLog, saved_bytes
from tests.relative_error import errors

WIDTH = 32


@layers(
    lambda dropout: dict(
        norm=nn.LayerNorm(WIDTH),
        up=nn.Linear(WIDTH, 4 * WIDTH),
        down=nn.Linear(4 * WIDTH, WIDTH),
        dropout=nn.Dropout(dropout),
    )
)
def Layer(self, x):
    return x + self.down(self.dropout(torch.tanh(torch.sigmoid(self.up(self.norm(x))))))


@layers(
    lambda checkpointed, dropout=0.0, layers=3: dict(
        layers=nn.ModuleList(Layer(dropout) for _ in range(layers)), checkpointed=checkpointed
    )
)
def Model(self, x):
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
    return x


def pair(dropout=0.0, policy="bf16", kind=Model):
    """Return the same model converted without checkpoints and, as one of ``kind``, with them, and an input."""
    torch.manual_seed(0)
    plain, dropping = Model(False, dropout), kind(True, dropout)
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(16, WIDTH)
    return amp_graph.convert(plain, policy), amp_graph.convert(dropping, policy), x


def step(model, x, seed=3):
    torch.manual_seed(seed)
    return step_of(model, x)


@pytest.mark.parametrize("policy", ["bf16", "bf16,accuracy=fast"])
def test_activations_are_really_dropped(policy):
    plain, dropping, x = pair(policy=policy)
    plain(x), dropping(x)  # captured outside of the measurement
    everything = saved_bytes(lambda: plain(x), plain, weight_copies=False)
    kept = saved_bytes(lambda: dropping(x), dropping, weight_copies=False)
    assert kept <= 0.35 * everything, (kept, everything)
    assert saved_bytes(lambda: dropping(x), dropping) <= 0.2 * saved_bytes(lambda: plain(x), plain) or "fast" in policy


@pytest.mark.parametrize("options", [{"policy": "bf16"}, {"policy": "bf16,accuracy=fast"}, {"dropout": 0.5}], ids=str)
def test_recomputation_gives_equal_gradients_and_draws_the_same_again(options):
    plain, dropping, x = pair(**options)
    found = step(dropping, x)
    assert all(map(torch.equal, step(plain, x), found))
    assert "dropout" not in options or not torch.equal(step(dropping, x, seed=4)[0], found[0])


def test_a_nested_and_a_multi_output_checkpoint():
    @layers(lambda: dict(a=nn.Linear(8, 8), b=nn.Linear(8, 8)))
    def Nested(self, x):
        def outer(x):
            h, twice = checkpoint(lambda x: (h := torch.tanh(self.a(x)), h * 2), x, use_reentrant=False)
            return self.b(h) + twice

        return checkpoint(outer, x, use_reentrant=False)

    model = Nested()
    own, x = copy.deepcopy(model), torch.randn(4, 8)
    out, *gradients = errors(step(amp_graph.convert(model, "bf16"), x), step(own, x))
    assert out <= 0.02
    assert max(gradients) <= 0.05


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


@forward_of(Model)
def Selective(self, x):
    context = partial(create_selective_checkpoint_contexts, PRODUCTS)
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=context)
    return x


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("policy", ["bf16", "O0"])
def test_a_selective_checkpoint_recomputes_what_it_does_not_save(policy, dropout):
    plain, model, x = pair(dropout, policy, Selective)
    out = model(x)
    with DtypeLog() as backward:
        out.square().sum().backward()
    ran = [name for name, _ in backward.entries]
    assert ran.count("aten.tanh") == 3  # one a layer
    assert ran.count("aten.addmm") == 0
    assert all(map(torch.equal, step(plain, x), step(model, x)))

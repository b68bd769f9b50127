"""Recorded calls over the whole corpus: the bits of autograd, or a reason."""

import pytest
import torch

import amp_graph
from amp_graph.capture import captured_graphs
from tests.corpus import CASES, make
from tests.replay import stand_in


def sum_in_each_graph(monkeypatch):
    """Have autograd add what one graph gives to the gradient of an input before it adds what other graphs give.

    A recording is one node of autograd. Of a sum over several graphs only the order differs: its last bit.
    """

    def behind_views(gm, inputs, compile, policy, **options):
        run = plain(gm, inputs, compile, policy, **options)

        def call(*args):
            trained = [torch.is_grad_enabled() and isinstance(a, torch.Tensor) and a.requires_grad for a in args]
            return run(*(a.view_as(a) if one else a for a, one in zip(args, trained, strict=True)))

        return call

    plain = captured_graphs.lower
    monkeypatch.setattr(captured_graphs, "lower", behind_views)


def train(name, steps, word=""):
    """Train a case of the corpus; return all losses and gradients, and the buffers at the end."""
    model, args, kwargs = make(name)
    amp_graph.convert(model, f"bf16{word}")
    torch.manual_seed(1)
    parameters, found = list(model.parameters()), []
    optimizer = torch.optim.SGD(parameters, lr=0.01) if parameters else None
    for _ in range(steps):
        loss = CASES[name].loss(model(*args, **kwargs))
        if "integer" not in CASES[name].tags:
            loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in parameters if p.grad is not None)]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(b.clone() for b in model.buffers())], model


def equal(one, two):
    assert len(one) == len(two)
    return all(torch.equal(a.to_dense().nan_to_num(), b.to_dense().nan_to_num()) for a, b in zip(one, two, strict=True))


def cases(*by_default):
    """The whole corpus; what is not named is left to `make test-long`."""
    return [pytest.param(n, marks=[] if n in by_default else pytest.mark.slow) for n in sorted(CASES)]


@pytest.mark.parametrize("name", cases("batch_norm_train", "dropout_mlp", "kv_cache", "nanogpt", "tied_weights"))
def test_recorded_graphs_have_the_bits_of_autograd_or_a_reason(name, monkeypatch):
    steps = 7
    sum_in_each_graph(monkeypatch)
    expected, _ = train(name, steps)
    torch._dynamo.reset()
    recorders = stand_in.install(monkeypatch).made
    found, model = train(name, steps, ",replay=true")
    assert equal(found, expected)
    notes = [note for note in amp_graph.report(model).notes if "is not recorded" in note]
    assert notes or sum(r.replayed for r in recorders) or not amp_graph.report(model).graphs

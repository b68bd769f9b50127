"""Forward and backward traced flat: the bits of autograd, step after step, over the whole corpus."""

import pytest
import torch
from torch import nn

import amp_graph
from amp_graph.capture import captured_graphs
from amp_graph.replay.recorder import CannotRecord
from amp_graph.replay.trace_flat import trace_flat
from tests.corpus import CASES, make
from tests.layers import forward_of
from tests.replay import stand_in
from tests.replay.flat_runner import FlatRunner

STEPS = 20


class Flattened:
    """Lets captured graphs run flat where they can; counts the runs, and keeps the reasons of the others."""

    def __init__(self, monkeypatch):
        self.runs, self.reasons = 0, set()
        self._lower = captured_graphs.lower
        monkeypatch.setattr(captured_graphs, "lower", self.lower)

    def lower(self, gm, inputs, compile, policy, **options):
        run, flat = self._lower(gm, inputs, compile, policy, **options), FlatRunner(gm)

        def call(*args):
            try:
                found = flat(*args)
            except CannotRecord as error:
                self.reasons.add(str(error))
                return run(*args)
            self.runs += 1
            return found

        return call


def sum_in_each_graph(monkeypatch):
    """Have autograd add what one graph gives to the gradient of an input before it adds what other graphs give.

    A flat graph is one node of autograd. Of a sum over several graphs only the order differs: its last bit.
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


@pytest.mark.parametrize("name", cases("batch_norm_train", "dropout_mlp", "nanogpt", "resnet_eval"))
def test_flat_graphs_have_the_bits_of_autograd(name, monkeypatch):
    sum_in_each_graph(monkeypatch)
    expected, _ = train(name, STEPS)
    torch._dynamo.reset()
    flat = Flattened(monkeypatch)
    assert equal(train(name, STEPS)[0], expected)
    assert flat.runs or flat.reasons


@pytest.mark.parametrize("name", cases("kv_cache", "tied_weights"))
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


def _tuple_of(gm):
    out = gm.graph.output_node()
    out.args = ((out.args[0],),)
    gm.recompile()
    return gm


@forward_of(nn.Module)
def Several(self, x, w, n):
    h = x @ w
    return h, h.relu().sum(), x, n


def test_outputs_that_are_given_back_and_gradients_of_any_layout():
    gm = torch.fx.symbolic_trace(Several())
    x, w = torch.randn(4, 6), torch.randn(6, 5, requires_grad=True)
    run = FlatRunner(gm)
    for loss in (lambda o: o[0].sum(), lambda o: o[1] * 2, lambda o: o[0].t().contiguous().t().square().sum() + o[1]):
        out, expected = run(x, w, 3), Several()(x, w, 3)
        assert out[2] is x
        assert out[3] == 3
        (found,), (grad,) = torch.autograd.grad(loss(out), w), torch.autograd.grad(loss(expected), w)
        assert torch.equal(found, grad)


def test_inputs_that_are_written_between_forward_and_backward_are_an_error_as_in_autograd():
    gm = torch.fx.symbolic_trace(Several())
    x, w = torch.randn(4, 6), torch.randn(6, 5, requires_grad=True)
    out = FlatRunner(gm)(x, w, 3)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[0].sum().backward()


@forward_of(nn.Module)
def Trained(self, x):
    return (x.mul_(2),)


@pytest.mark.parametrize(
    ("module", "args", "why"),
    [
        (Trained(), (torch.ones(2, requires_grad=True) * 1,), "used in an in-place operation"),
        (_tuple_of(torch.fx.symbolic_trace(nn.Flatten())), (torch.ones(2, 2, 2),), "shares memory"),
    ],
    ids=["written", "view"],
)
def test_what_cannot_be_flat_says_why(module, args, why):
    gm = module if isinstance(module, torch.fx.GraphModule) else torch.fx.symbolic_trace(module)
    with pytest.raises(CannotRecord, match=why):
        trace_flat(gm, args)

"""Casts of many weights by one call, as on a GPU, here on the CPU: bit for bit what one call for each gives."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.weights import batch_weight_casts
from tests.by_hand import step_of
from tests.layers import layers

TOGETHER = "bf16,skip=channels_last"
ALONE = "bf16,skip=channels_last|batch_weight_casts"


@pytest.fixture(autouse=True)
def _is_profitable(monkeypatch):
    monkeypatch.setattr(batch_weight_casts, "LEAST_TRAINED", 3)
    monkeypatch.setattr(batch_weight_casts, "few_calls_are_profitable", lambda device: True)


@layers(
    lambda: dict(
        conv=nn.Conv2d(3, 8, 3),
        first=nn.Linear(8, 16),
        frozen=nn.Linear(16, 16).requires_grad_(False),
        last=nn.Linear(16, 4),
        none=nn.Linear(4, 4),
    ),
    seed=0,
)
def Net(self, x):
    """Convolutions and linears, one of them frozen, one that is not used."""
    x = F.relu(self.conv(x)).mean((2, 3))
    x = self.last(F.gelu(self.frozen(self.first(x))))
    return x, self.none(x.detach())


def net(policy):
    return amp_graph.convert(Net(), policy, strict=True)


def batch(seed=0):
    return torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


def lines(model):
    return [line for graph in amp_graph.report(model).graphs for line in graph.text.splitlines()]


def calls(model):
    return sum(" low_weights(" in line for line in lines(model))


def gradients(model, output):
    model.zero_grad()
    output.float().square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grad is None) == (found[name] is None), name
        assert grad is None or torch.equal(grad, found[name]), name


@pytest.mark.parametrize("grad", [True, False])
def test_it_stays_in_graphs_that_are_verified(monkeypatch, grad):
    """The memory that the casts of a group write to is the group's own, no memory of the graph's."""
    monkeypatch.setenv("AMP_GRAPH_VERIFY", "1")
    model = net(TOGETHER)
    with torch.set_grad_enabled(grad):
        model(batch())
    assert calls(model) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_and_gradients_are_those_of_casts_alone(dtype):
    (together, alone), x = (net(p.replace("bf16", dtype)) for p in (TOGETHER, ALONE)), batch()
    for _ in range(2):
        ours, theirs = together(x), alone(x)
        assert all(map(torch.equal, ours, theirs))
        assert_same(gradients(together, ours[0]), gradients(alone, theirs[0]))  # `none` gets no gradient
    assert (calls(together), calls(alone)) == (1, 0)  # of the frozen ones there are too few
    casts = [c for c in amp_graph.report(together).graphs[0].casts if c.of == "weight"]
    assert {c.source for c in casts} >= {"conv.weight", "last.bias", "frozen.weight"}


def test_gradients_of_gradients_and_of_many_at_once():
    found = []
    for model in map(net, (TOGETHER, ALONE)):
        weights = [model.conv.weight, model.first.weight, model.last.bias]
        out = model(batch())[0].float()
        (one,) = torch.autograd.grad(out.square().sum(), weights[1:2], create_graph=True)
        many = torch.autograd.grad(model(batch())[0], weights, torch.eye(20).view(20, 5, 4), is_grads_batched=True)
        found.append([one, *torch.autograd.grad(one.square().sum(), weights), *many])
    assert all(map(torch.equal, *found))


def test_a_graph_that_waits_for_its_backward_keeps_what_it_read():
    found = []
    for model in map(net, (TOGETHER, ALONE)):
        out = model(batch())[0]
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        model(batch(1))
        found.append(gradients(model, out))
    assert_same(*found)


@layers(
    lambda: dict(
        body=nn.Linear(4, 4),
        beside=nn.Linear(4, 4),
        heads=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
        idle=nn.Linear(4, 4),
    ),
    seed=0,
)
def Branches(self, x):
    """Two heads, and a layer whose result goes by memory that is written."""
    h = self.body(x)
    view = h.view(-1)
    view.add_(self.beside(x).view(-1))
    self.idle(h.detach())
    return [head(h) for head in self.heads]


def test_weights_on_several_devices_are_apart(monkeypatch):
    def elsewhere(node):
        found = value(node)
        first = node.op == "call_method" and "first" in str(node.args[0])
        return SimpleNamespace(dtype=found.dtype, device=torch.device("meta")) if first else found

    monkeypatch.setattr(batch_weight_casts, "LEAST_TRAINED", 2)
    monkeypatch.setattr(batch_weight_casts, "value", elsewhere)
    model = net(TOGETHER)
    model(batch())
    grouped = [line for line in lines(model) if " low_weights(" in line]
    assert sorted(line.count("%") - 1 for line in grouped) == [2, 2, 4]  # first; none; conv and last


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_no_hook_hears_of_a_weight_without_a_gradient(used, monkeypatch):
    monkeypatch.setattr(batch_weight_casts, "LEAST_TRAINED", 2)
    found = []
    for policy in (TOGETHER, ALONE):
        model, heard = amp_graph.convert(Branches(), policy, strict=True), set()
        for name, p in model.named_parameters():
            p.register_hook(lambda grad, name=name, heard=heard: heard.add((name, grad is None)))
        out = model(torch.ones(3, 4))
        found.append((gradients(model, sum(out[i].float() for i in used)), heard))
        assert calls(model) == (3 if policy == TOGETHER else 0)
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert ("body.weight", False) in heard
    assert len(heard) == 4 + 2 * len(used)


def test_large_weights_do_not_wait_for_all_others(monkeypatch):
    monkeypatch.setattr(batch_weight_casts, "MOST", 1000)
    monkeypatch.setattr(batch_weight_casts, "LEAST_TRAINED", 1)
    model, order = net(TOGETHER), []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    gradients(model, model(batch())[0])
    assert calls(model) == 3  # of two layers' weights, of which one fills a group, and of what reaches another output
    assert set(order[:4]) == {"first.weight", "first.bias", "last.weight", "last.bias"}


@layers(
    lambda how: dict(
        how=how,
        w=nn.ParameterList(nn.Parameter(torch.randn(4, 4), requires_grad="frozen" not in how) for _ in range(4)),
    ),
    seed=0,
)
def Refused(self, x):
    if self.how == "written":
        with torch.no_grad():
            for w in self.w:
                w.mul_(0.5)
    for w in self.w:
        if self.how == "frozen and written":
            w.mul_(0.5)
        x = x @ w
    return x


@pytest.mark.parametrize(("how", "grouped"), [("", 1), ("written", 0), ("frozen", 1), ("frozen and written", 0)])
def test_what_the_graph_writes_is_cast_where_it_is_read(how, grouped):
    models = [amp_graph.convert(Refused(how), policy) for policy in (TOGETHER, ALONE)]
    assert torch.equal(*([model(torch.ones(2, 4)) for _ in range(2)][-1] for model in models))
    assert [calls(model) for model in models] == [grouped, 0]


def test_channels_last_weights_are_cast_into_their_layout():
    weights = [nn.Parameter(torch.randn(8, 4, 3, 3)), nn.Parameter(torch.randn(5, 7).t())]
    low = batch_weight_casts.low_weights(weights, torch.bfloat16, (torch.channels_last, None))
    assert low[0].is_contiguous(memory_format=torch.channels_last)
    assert low[1].stride() == weights[1].stride()
    assert all(torch.equal(a, w.bfloat16()) for a, w in zip(low, weights, strict=True))
    given = [torch.randn_like(t) for t in low]
    found = torch.autograd.grad(low, weights, given)
    assert all(g.dtype == torch.float32 and g.stride() == w.stride() for g, w in zip(found, weights, strict=True))
    assert all(torch.equal(g, one.float()) for g, one in zip(found, given, strict=True))


@pytest.mark.parametrize(("layers", "grouped"), [(3, False), (4, True)])
def test_eight_weights_that_train_are_a_group(layers, grouped, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("amp_graph.capture.diagnostics.WARNS", False)
    monkeypatch.setattr(batch_weight_casts, "few_calls_are_profitable", lambda device: True)
    model = amp_graph.convert(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))), TOGETHER, strict=True)
    model(torch.zeros(1, 8))
    assert bool(calls(model)) == grouped


@layers(lambda: dict(parts=nn.ModuleList(nn.Linear(16, 16) for _ in range(6))), seed=0)
def Switching(self, x):
    """A weight that is read without gradients, and others that train."""
    with torch.no_grad():
        x = self.parts[0](x)
    for part in self.parts:
        x = part(x)
    return x


def test_a_graph_that_switches_gradients_off_casts_each_weight_where_it_is_read():
    models = [amp_graph.convert(Switching(), policy, strict=True) for policy in (TOGETHER, ALONE)]
    assert all(map(torch.equal, *(step_of(model, torch.linspace(-1, 1, 64).view(4, 16)) for model in models)))
    assert [calls(model) for model in models] == [0, 0]

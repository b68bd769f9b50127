"""Recurrent layers in compiled models: whole calls, whose results and gradients are those of the eager model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes import recurrent_layers
from amp_graph.passes.operators import OPS

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM both ways": (nn.LSTM, {"bidirectional": True}),
    "LSTM without biases": (nn.LSTM, {"bias": False}),
    "LSTM with projections": (nn.LSTM, {"proj_size": 4}),
    "GRU": (nn.GRU, {}),
    "GRU both ways": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {}),
    "RNN of relus": (nn.RNN, {"nonlinearity": "relu"}),
}
WHOLE = (
    OPS.recurrent.default,
    OPS.mkldnn_rnn_layer.default,
    OPS.recurrent_backward.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default,
)


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(8, 8, 2, batch_first=True, **options)
        self.head = nn.Linear(8 * (2 if self.layers.bidirectional else 1) if not self.layers.proj_size else 4, 3)

    def forward(self, x):
        out, last = self.layers(x)
        return self.head(out), last


def built(kind):
    torch.manual_seed(0)
    made, options = KINDS[kind]
    return Net(made, **options)


def step(model, x):
    x = x.clone().requires_grad_()
    out, last = model(x)
    (out.square().mean() + (last if isinstance(last, torch.Tensor) else last[1]).sum()).backward()
    states = [last] if isinstance(last, torch.Tensor) else list(last)
    return [out.detach(), *(s.detach() for s in states), x.grad, *(p.grad for p in model.parameters())]


def counted(graphs):
    """How many whole calls of recurrent layers there are, and how many nodes, in all graphs."""
    nodes = [n for gm in graphs for n in gm.graph.nodes if n.op == "call_function"]
    return sum(n.target in WHOLE for n in nodes), len(nodes)


def watching(graphs):
    """A backend that keeps the flat graphs of both passes."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def keep(gm, _):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


X = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_eager_model(kind):
    wanted = step(amp_graph.convert(built(kind), "bf16"), X)
    graphs = []
    got = step(amp_graph.convert(built(kind), "bf16", compile=watching(graphs)), X)
    assert torch.equal(got[0], wanted[0])
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm(), "more than another order of two summands"
    whole, nodes = counted(graphs)
    layers = 2 * (2 if "both" in kind else 1)
    assert whole == 2 * (layers if kind.startswith("LSTM") and "proj" not in kind else 1)
    assert nodes < 20 * layers * 8, "the layers were taken apart"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_without_gradients_all_layers_are_one_call(kind):
    wanted = amp_graph.convert(built(kind), "bf16").eval()
    graphs = []
    compiled = amp_graph.convert(built(kind), "bf16", compile=watching(graphs)).eval()
    with torch.no_grad():
        for length in (20, 7, 11):
            given = X[:, :length]
            assert torch.equal(compiled(given)[0], wanted(given)[0])
    assert counted(graphs)[0] == len(graphs)


def test_without_the_pass_the_steps_are_taken_apart():
    graphs = []
    step(amp_graph.convert(built("LSTM"), "bf16,skip=keep_recurrent", compile=watching(graphs)), X)
    whole, nodes = counted(graphs)
    assert whole == 0
    assert nodes > 20 * 8


def test_dropout_between_the_layers_is_drawn():
    """Torch's decomposition, which a compiler takes layers apart by, leaves it out."""
    torch.manual_seed(0)
    model = Net(nn.LSTM, dropout=0.5)
    graphs = []
    wanted, got = copy.deepcopy(model), amp_graph.convert(model, "bf16", compile=watching(graphs))
    amp_graph.convert(wanted, "bf16")
    found = []
    for one in (wanted, got):
        torch.manual_seed(1)
        found.append(step(one, X))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_inductor_compiles_them(kind):
    wanted = step(amp_graph.convert(built(kind), "bf16"), X)
    got = step(amp_graph.convert(built(kind), "bf16", compile="inductor"), X)
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm() + 1e-6


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_compiled_training_step(kind):
    found = []
    for compile in ("eager", "aot_eager"):
        model = built(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train = amp_graph.TrainStep(
            model, lambda out, y: F.mse_loss(out[0], y), optimizer, "bf16,skip=accumulate_in_place", compile=compile
        )
        losses = [train(X, torch.ones(2, 20, 3)).item() for _ in range(3)]
        found.append(losses)
        if compile != "eager":
            assert counted([train.captured[0].steps[True].gm])[0] == (4 if kind == "LSTM" else 2)
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-3, atol=0)
    assert found[0][2] < found[0][0]


def test_our_backend_keeps_them_whole_as_well():
    graphs = []
    options = {"policy": "bf16", "compile": watching(graphs)}
    step(torch.compile(built("GRU"), backend="amp_graph", options=options), X)
    assert len(graphs) in (0, 2), "Dynamo leaves recurrent layers out of graphs, unless it is told otherwise"
    with torch._dynamo.config.patch(allow_rnn=True):
        torch._dynamo.reset()
        step(torch.compile(built("GRU"), backend="amp_graph", options=options), X)
    assert counted(graphs)[0] == 2


def test_gradients_of_gradients():
    torch.manual_seed(0)
    model, x = nn.GRU(4, 4).double(), torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)

    def whole(x, *params):
        hidden = torch.zeros(1, 2, 4, dtype=torch.float64)
        return recurrent_layers.recurrent_whole("gru", x, [hidden], params, True, 1, 0.0, True, False, False)[0]

    assert torch.autograd.gradcheck(whole, (x, *model.parameters()))
    assert torch.autograd.gradgradcheck(whole, (x, *model.parameters()))

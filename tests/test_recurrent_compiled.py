"""Recurrent layers in compiled models: whole calls, whose results and gradients are those of the eager model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes import lstm_backward, recurrent, recurrent_layers, what_pays
from amp_graph.passes.operators import OPS
from amp_graph.passes.torch_private import keeps_lstm_workspaces
from tests.measure import DtypeLog

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
    one_a_layer = kind.startswith("LSTM") and "proj" not in kind and keeps_lstm_workspaces()
    assert whole == 2 * (layers if one_a_layer else 1)
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
            assert counted([train.captured[0].steps[True].gm])[0] == (
                4 if kind == "LSTM" and keeps_lstm_workspaces() else 2
            )
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


def gradients(dtype, reverse=False, seed=0):
    """The gradients of an LSTM layer by products, by torch's kernel, and in fp64, for all that it takes."""
    torch.manual_seed(seed)
    model = nn.LSTM(24, 40, bidirectional=reverse).to(dtype)
    weights = list(model.parameters())[4:] if reverse else list(model.parameters())
    x, h, c = (torch.randn(*shape).to(dtype) for shape in ((9, 5, 24), (5, 40), (5, 40)))
    given = [x, *weights, h, c]
    dout, dh, dc = (torch.randn(*shape).to(dtype) for shape in ((9, 5, 40), (5, 40), (5, 40)))

    def by(layer, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        outs = layer(*leaves)
        return torch.autograd.grad(outs, leaves, [t.to(dtype) for t in (dout, dh, dc)])

    def wide(x, w_ih, w_hh, b_ih, b_hh, h, c):
        x = x.flip(0) if reverse else x
        out, h, c = torch.lstm(x, (h[None], c[None]), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, True, False, False)
        return out.flip(0) if reverse else out, h[0], c[0]

    def ours(layer):
        return lambda *leaves: layer.apply(*leaves, reverse, True, reverse)

    return by(ours(recurrent._LstmByProducts), dtype), by(ours(recurrent._LstmLayer), dtype), by(wide, torch.float64)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_by_products_are_at_least_as_near_to_fp64_as_the_kernels(reverse, seed):
    for ours, torchs, exact in zip(*gradients(torch.bfloat16, reverse, seed), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() <= 1.05 * (torchs - exact).norm() + 2**-9 * exact.norm()
        assert (ours - exact).norm() <= 6e-3 * exact.norm()


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_by_products_are_right(reverse, monkeypatch):
    monkeypatch.setattr(lstm_backward, "linear_of_packed_weight", lambda x, packed, bias: F.linear(x, packed, bias))
    monkeypatch.setattr(lstm_backward, "pack_linear_weight", lambda weight: weight)
    for ours, _, exact in zip(*gradients(torch.float32, reverse), strict=True):
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("compile", ["eager", "aot_eager", "step"])
def test_an_lstm_that_trains_has_the_faster_backward_where_it_pays(compile, monkeypatch):
    monkeypatch.setattr(what_pays, "FEWEST_OF_A_STATE", 1)
    monkeypatch.setattr(what_pays, "STATES_OF_A_BATCH", 1)
    monkeypatch.setattr(what_pays, "multiplies_bf16", lambda: True)
    calls = []
    torch.manual_seed(0)
    plain = Net(nn.LSTM)
    wanted = step(copy.deepcopy(plain), X)
    with DtypeLog() as log:
        if compile == "step":
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
            train = amp_graph.TrainStep(plain, lambda out, y: F.mse_loss(out[0], y), optimizer, "bf16")
            train(X, torch.ones(2, 20, 3))
            calls = [n for n in train.captured[0].steps[True].gm.graph.nodes if n.target is OPS.lstm_backward.default]
        else:
            got = step(amp_graph.convert(plain, "bf16", compile=compile), X)
            for a, b in zip(got, wanted, strict=True):
                assert (a - b).norm() <= 2e-2 * b.norm() + 1e-5
            calls = [name for name, _ in log.entries if "lstm_backward" in name]
    assert len(calls) == 2


def test_gradients_of_the_gradients_by_products():
    for layer in (recurrent._LstmByProducts, recurrent._LstmLayer):
        torch.manual_seed(0)
        given = [
            torch.randn(s, requires_grad=True) for s in ((3, 2, 4), (16, 4), (16, 4), (16,), (16,), (2, 4), (2, 4))
        ]

        def second(run, given=given):
            (first,) = torch.autograd.grad(run(*given).square().sum(), given[0], create_graph=True)
            return torch.autograd.grad(first.square().sum(), given)

        def torchs(x, w_ih, w_hh, b_ih, b_hh, h, c):
            return torch.lstm(x, (h[None], c[None]), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, True, False, False)[0]

        ours = second(lambda *t, layer=layer: layer.apply(*t, False, True, False)[0])
        for a, b in zip(ours, second(torchs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

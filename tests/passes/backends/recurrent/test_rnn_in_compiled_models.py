"""Recurrent layers in compiled models: whole calls, whose results and gradients are those of the eager model."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_graph
from amp_graph.passes.backends.recurrent import lstm_functions, lstm_kernel
from amp_graph.passes.backends.recurrent.layer_kernels import differentiable
from amp_graph.passes.native import gemm_thresholds
from amp_graph.passes.native.gemm_thresholds import lstm_kernel_is_profitable
from amp_graph.passes.native.operator_library import OPS
from amp_graph.passes.torch_compat import keeps_lstm_workspaces
from amp_graph.passes.torch_compat.devices import onednn_takes_bf16
from tests.layers import layers
from tests.measure import DtypeLog
from tests.relative_error import errors

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
KINDS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM both ways": (nn.LSTM, {"bidirectional": True}),
    "LSTM without biases": (nn.LSTM, {"bias": False}),
    "LSTM that drops, without projections": (
        nn.LSTM,
        {"dropout": 0.5},
    ),  # between layers, which torch's parts leave out
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
    OPS.lstm_forward.default,
    OPS.lstm_backward_of_sums.default,
    OPS.gru_forward.default,
    OPS.gru_backward.default,
)
NO_KERNEL = lstm_kernel.library() is None or not lstm_kernel_is_profitable("cpu", torch.bfloat16, 1, 8)
needs_kernel = pytest.mark.skipif(NO_KERNEL, reason="LSTMs are compiled C with dot products, without AMX")


@layers(
    lambda kind, **options: dict(
        layers=(made := kind(8, 12, 2, batch_first=True, **options)),
        head=nn.Linear(12 * (2 if made.bidirectional else 1) if not made.proj_size else 4, 3),
    ),
    seed=0,
)
def Net(self, x):
    out, last = self.layers(x)
    return self.head(out), last


def built(kind):
    made, options = KINDS[kind]
    return Net(made, **options)


def step(model, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
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


@pytest.fixture(params=["as here", "by onednn"])
def anyhow(request, monkeypatch):
    """LSTMs by compiled C where that pays, and as where it does not."""
    if request.param == "by onednn":
        monkeypatch.setattr(lstm_functions, "lstm_kernel_is_profitable", lambda *given: False)
    return request.param


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch's own, once a process, in eager mode as well
@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_eager_model(kind, anyhow):
    wanted = step(amp_graph.convert(built(kind), "bf16"), X)
    graphs = []
    got = step(amp_graph.convert(built(kind), "bf16", compile=watching(graphs)), X)
    assert torch.equal(got[0], wanted[0])
    assert max(errors(got, wanted)) <= 1e-6, "more than another order of two summands"
    assert max(errors(wanted, step(built(kind), X))) <= 0.03
    whole, nodes = counted(graphs)
    layers = 2 * (2 if "both" in kind else 1)
    of_lstm = kind.startswith("LSTM") and "proj" not in kind and is_taken_by_layers(anyhow)
    one_a_layer = of_lstm or kind.startswith("GRU")
    assert whole == 2 * (layers if one_a_layer else 1)
    assert nodes < 20 * layers * 8, "the layers were taken apart"


def is_taken_by_layers(anyhow):
    return onednn_takes_bf16() and (keeps_lstm_workspaces() or (anyhow == "as here" and not NO_KERNEL))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_without_gradients_all_layers_are_one_call_and_those_of_a_gru_one_each(kind):
    wanted = amp_graph.convert(built(kind), "bf16").eval()
    graphs = []
    compiled = amp_graph.convert(built(kind), "bf16", compile=watching(graphs)).eval()
    with torch.no_grad():
        for length in (20, 7, 11):
            given = X[:, :length]
            assert torch.equal(compiled(given)[0], wanted(given)[0])
    assert counted(graphs)[0] == len(graphs) * (2 if kind == "GRU" else 1)


@pytest.mark.parametrize("kind", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow)])
def test_inductor_compiles_them(kind):
    wanted = step(amp_graph.convert(built(kind), "bf16"), X)
    got = step(amp_graph.convert(built(kind), "bf16", compile="inductor"), X)
    assert max(errors(got, wanted)) <= 1e-2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_compiled_training_step(kind, anyhow):
    found = []
    for compile in ("eager", "aot_eager"):
        model = built(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        train = amp_graph.TrainStep(model, lambda out, y: F.mse_loss(out[0], y), optimizer, "bf16", compile=compile)
        found.append([train(X, torch.ones(2, 20, 3)).item() for _ in range(3)])
        if compile != "eager":
            assert counted([train.captured[0].step.gm])[0] == (4 if kind == "GRU" or is_taken_by_layers(anyhow) else 2)
    torch.testing.assert_close(*map(torch.tensor, found), rtol=1e-3, atol=0)
    assert found[0][2] < found[0][0]


# length, batch, width, units
SIZES = [(9, 5, 24, 40), (1, 1, 9, 3), (3, 2, 7, 5), (2, 9, 33, 17), (4, 3, 64, 80), (20, 4, 1, 130)]


def gradients(dtype, reverse=False, sizes=SIZES[0]):
    """What an LSTM layer of ours makes, what torch's kernel does, and in fp64: results, and the gradients of all."""
    torch.manual_seed(0)
    length, batch, width, size = sizes
    model = nn.LSTM(width, size, bidirectional=reverse).to(dtype)
    weights = list(model.parameters())[4:] if reverse else list(model.parameters())
    x, h, c = (torch.randn(*shape).to(dtype) for shape in ((length, batch, width), (batch, size), (batch, size)))
    given = [x, *weights, h, c]
    seeds = [torch.randn(*shape).to(dtype) for shape in ((length, batch, size), (batch, size), (batch, size))]

    def by(layer, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        outs = layer(*leaves)
        return [*outs, *torch.autograd.grad(outs, leaves, [t.to(dtype) for t in seeds])]

    def wide(x, w_ih, w_hh, b_ih, b_hh, h, c):
        x = x.flip(0) if reverse else x
        out, h, c = torch.lstm(x, (h[None], c[None]), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, True, False, False)
        return out.flip(0) if reverse else out, h[0], c[0]

    ours, torchs = (layer(size, reverse, compiled=compiled) for compiled in (True, False))
    return by(ours, dtype), by(torchs, dtype), by(wide, torch.float64)


def layer(size, reverse, *, compiled):
    return partial(differentiable, lstm_functions.kernels_of(size, reverse, True, reverse, compiled=compiled))


def is_near(ours, torchs, exact):
    error = (ours - exact).norm()
    return error <= 1.05 * (torchs - exact).norm() + 2**-9 * exact.norm() and error <= 6e-3 * exact.norm()


@needs_kernel
@pytest.mark.onednn
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer_of_ours_is_at_least_as_near_to_fp64_as_the_kernels(reverse, sizes):
    found = gradients(torch.bfloat16, reverse, sizes=sizes)
    for ours, torchs, exact in zip(*found, strict=True):
        assert (ours.dtype, ours.shape) == (torch.bfloat16, torchs.shape)
        assert is_near(ours, torchs, exact)


@needs_kernel
@pytest.mark.parametrize("threads", [2, 3, 64])
@pytest.mark.parametrize("sizes", [(3, 2, 7, 5), (4, 9, 64, 80)])
def test_threads_of_a_compiled_layer_change_no_bit(sizes, threads, monkeypatch):
    alone, *_ = gradients(torch.bfloat16, sizes=sizes)
    monkeypatch.setattr(lstm_kernel, "threads_at_once", lambda elements: threads)
    together, *_ = gradients(torch.bfloat16, sizes=sizes)
    assert all(map(torch.equal, alone, together))


@needs_kernel
@pytest.mark.parametrize("broken", ["bias", "cells"])
def test_control_a_layer_without_its_bias_or_first_cells_is_seen(broken, monkeypatch):
    def without(x, w_ih, w_hh, b_ih, b_hh, h, c, reverse):
        lost = (b_ih * 0, b_hh * 0, h, c) if broken == "bias" else (b_ih, b_hh, h, c * 0)
        return lstm_kernel.lstm_forward(x, w_ih, w_hh, *lost, reverse)

    others = {name: getattr(OPS, name) for name in ("lstm_backward_of_sums", "mkldnn_rnn_layer")}
    monkeypatch.setattr(lstm_functions, "OPS", SimpleNamespace(lstm_forward=without, **others))
    found = zip(*gradients(torch.bfloat16), strict=True)
    assert not all(is_near(*one) for one in found)


@needs_kernel
def test_a_compiled_layer_gives_infinities_and_nans_on():
    x = torch.randn(3, 2, 16).bfloat16()
    given = [torch.randn(s).bfloat16() for s in ((64, 16), (64, 16), (64,), (64,), (2, 16), (2, 16))]
    for value in (float("inf"), float("nan")):
        x[1, 0, 3] = value
        ours, torchs = (layer(16, False, compiled=compiled)(x, *given)[0] for compiled in (True, False))
        assert torch.equal(ours.isnan(), torchs.isnan())
        torch.testing.assert_close(ours, torchs, rtol=2**-6, atol=2**-6, equal_nan=True)


@pytest.mark.sampled(2)
@needs_kernel
@pytest.mark.onednn
@pytest.mark.parametrize("compile", ["eager", "aot_eager", "step"])
def test_an_lstm_that_trains_has_the_faster_backward_where_it_pays(compile, monkeypatch):
    name = "lstm_backward_of_sums"
    backward = getattr(OPS, name).default
    monkeypatch.setattr(gemm_thresholds, "STATES_BY_UNITS", 1)
    calls = []
    plain = Net(nn.LSTM)
    wanted = step(copy.deepcopy(plain), X)
    with DtypeLog() as log:
        if compile == "step":
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
            train = amp_graph.TrainStep(plain, lambda out, y: F.mse_loss(out[0], y), optimizer, "bf16")
            train(X, torch.ones(2, 20, 3))
            calls = [n for n in train.captured[0].step.gm.graph.nodes if n.target is backward]
        else:
            got = step(amp_graph.convert(plain, "bf16", compile=compile), X)
            assert max(errors(got, wanted)) <= 2e-2
            calls = [called for called, _ in log.entries if called.split(".")[1] == name]
    assert len(calls) == 2

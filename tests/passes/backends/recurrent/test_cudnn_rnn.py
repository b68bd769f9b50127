"""What cuDNN is called with for recurrent layers, without a GPU: its part is played by torch's layers on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from amp_graph.passes.backends.recurrent import cudnn_rnn, lower_rnn, rnn_functions
from amp_graph.passes.backends.recurrent.lower_rnn import CudnnRnn
from amp_graph.passes.backends.recurrent.rnn_functions import recurrent_whole
from tests.passes.graphs import capture, passes_before

LENGTH, BATCH, WIDTH, SIZE = 5, 3, 6, 4
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
NAMES = {number: kind for kind, number in cudnn_rnn.MODES.items()}


def layers(mode, x, weights, stride, h, c, count, two_ways):
    directions = 2 if two_ways else 1
    assert len(weights) == stride * count * directions
    call, hidden = getattr(torch, NAMES[mode]), h if c is None else (h, c)
    out, *last = call(x, hidden, list(weights), stride == 4, count, 0.0, False, two_ways, False)
    return [out, *last]


class Played:
    """The operators, with what they were told of training."""

    def __init__(self):
        self.trained = []

    def _cudnn_rnn_flatten_weight(self, weights, stride, width, mode, size, proj, count, first, two_ways):
        assert (width, size, proj, first) == (WIDTH, SIZE, 0, False)
        assert len(weights) == stride * count * (2 if two_ways else 1)
        piece = torch.cat([w.flatten() for w in weights])
        for w, part in zip(weights, piece.split([w.numel() for w in weights]), strict=True):
            w.set_(part.view_as(w))
        return piece

    def _cudnn_rnn(self, x, weights, stride, buffer, h, c, mode, size, proj, count, first, drop, train, two_ways, *_):
        assert (size, proj, first, drop) == (SIZE, 0, False, 0.0)
        assert all(w.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for w in weights)
        self.trained.append(train)
        out, last, *cell = layers(mode, x, weights, stride, h, c, count, two_ways)
        reserve = torch.arange(3 if train else 0, dtype=torch.uint8)
        return out, last, cell[0] if cell else None, reserve, buffer

    def _cudnn_rnn_backward(self, x, weights, stride, buffer, h, c, out, dout, dh, dc, mode, size, proj, count, first,
                            drop, train, two_ways, sizes, state, reserve, mask):  # fmt: skip
        assert train
        assert mask == [True, True, c is not None, True]  # cuDNN refuses to be asked for what is not there
        assert reserve.tolist() == [0, 1, 2]
        reserve.zero_()  # as cuDNN writes to it
        assert buffer.numel() == sum(w.numel() for w in weights)
        given = [t.detach().requires_grad_() for t in (x, h, *([] if c is None else [c]), *weights)]
        states = given[1 : 2 + (c is not None)]
        with torch.enable_grad():
            found = layers(
                mode, given[0], given[1 + len(states) :], stride, *states, *[None] * (c is None), count, two_ways
            )
        grads = torch.autograd.grad(found, given, [dout, dh, *([] if dc is None else [dc])])
        dx, dh0, *rest = grads
        return dx, dh0, rest.pop(0) if c is not None else None, rest


@pytest.fixture
def played(monkeypatch):
    made = Played()
    monkeypatch.setattr(cudnn_rnn, "ATEN", made)
    monkeypatch.setattr(rnn_functions, "runs_by_cudnn", lambda *_: True)
    for what_the_cpu_does in ("onednn_trains", "rounds_its_state"):
        monkeypatch.setattr(rnn_functions, what_the_cpu_does, lambda *_: False)
    return made


def given(kind, count, two_ways, biases):
    torch.manual_seed(0)
    module = KINDS[kind](WIDTH, SIZE, count, bias=biases, bidirectional=two_ways)
    x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
    number = 2 if kind == "lstm" else 1
    hidden = [torch.randn(count * (2 if two_ways else 1), BATCH, SIZE, requires_grad=True) for _ in range(number)]
    return module, x, hidden


def expected(kind, module, x, hidden):
    out, last = module(x, tuple(hidden) if kind == "lstm" else hidden[0])
    return [out, *(last if kind == "lstm" else [last])]


def loss(found):
    return sum((t * (i + 1)).square().sum() for i, t in enumerate(found))


@pytest.mark.parametrize("two_ways", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_go_where_they_belong(kind, biases, two_ways, played):
    module, x, hidden = given(kind, 2, two_ways, biases)
    params = list(module.parameters())
    leaves = [x, *hidden, *params]
    wanted = expected(kind, module, x, hidden)
    grads = torch.autograd.grad(loss(wanted), leaves)
    found = recurrent_whole(kind, x, hidden, params, biases, 2, 0.0, True, two_ways, False)
    assert played.trained == [True]
    torch.testing.assert_close(
        list((*found, *torch.autograd.grad(loss(found), leaves, retain_graph=True))), list((*wanted, *grads))
    )
    again = torch.autograd.grad(loss(found), leaves)  # what cuDNN reserved is as it was
    assert all(map(torch.allclose, again, grads))
    assert len({p.untyped_storage().data_ptr() for p in params}) == len(params), "the model's own weights were moved"


def test_without_gradients_nothing_is_kept_for_them(played):
    module, x, hidden = given("lstm", 1, False, True)
    with torch.no_grad():
        found = recurrent_whole("lstm", x, hidden, list(module.parameters()), True, 1, 0.0, False, False, False)
        wanted = expected("lstm", module, x, hidden)
    assert played.trained == [False]
    assert all(map(torch.allclose, found, wanted))


@pytest.mark.parametrize(("device", "whole"), [("cuda", True), ("cpu", False)])
def test_the_pass_is_for_cuda_alone(device, whole, monkeypatch):
    with torch._dynamo.config.patch(allow_rnn=True):
        graph = capture(nn.RNN(WIDTH, SIZE), torch.randn(LENGTH, BATCH, WIDTH))
    gm, _ = graph.through(passes_before(CudnnRnn))
    seen = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr(lower_rnn, "value", lambda node: seen)
    assert CudnnRnn().run(gm).modified == whole
    assert any(n.target is recurrent_whole for n in gm.graph.nodes) == whole

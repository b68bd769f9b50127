"""LSTMs, GRUs and RNNs for graphs: each layer as one call, with a backward of its own.

Before: ``torch.lstm(...)``, which tracers unroll step by step: 64 steps are thousands of nodes, for which Inductor
takes more than ten minutes.
After: ``recurrent_whole("lstm", ...)``: one node for all layers, or one per layer where oneDNN trains an LSTM, and as
many in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.recurrent.cudnn_rnn import cudnn_layers, runs_by_cudnn
from amp_graph.passes.backends.recurrent.gru_functions import gru_layer
from amp_graph.passes.backends.recurrent.layer_kernels import Kernels, differentiable
from amp_graph.passes.backends.recurrent.lstm_functions import lstm_layer, onednn_trains
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.torch_compat.autograd import autograd_inside

Tensors = Sequence[Tensor]
How = tuple[bool, int, bool]  # whether there are biases, the number of layers, whether they go both ways
KINDS: dict[str, Any] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def recurrent_whole(
    kind: str,
    x: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return what ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` returns: the output, then the last states.

    kind: the name of that function. x: [length, batch, width], or [batch, length, width] with ``batch_first``; hidden:
    the initial states, each [layers * directions, batch, size]; params: as in ``module._flat_weights``.

    Forward is torch's own, bit for bit, and so are gradients, except for the order of sums; backward runs the forward
    again, except for LSTMs that oneDNN trains. Low-precision GRUs on the CPU carry their state in fp32, unlike torch's.
    Dropout between layers is drawn where torch draws it.
    """
    how = has_biases, num_layers, bidirectional
    x = x.transpose(0, 1) if batch_first else x
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *hidden, *params))
    layer_by_layer = (trains and kind == "lstm" and onednn_trains(x, hidden, params)) or rounds_its_state(kind, x)
    if layer_by_layer or (dropout and train and num_layers > 1):
        out, *last = _in_layers(kind, x, hidden, params, how, dropout if train else 0.0, layer_by_layer)
    else:
        out, *last = _at_once(kind, x, hidden, params, how)
    return (out.transpose(0, 1) if batch_first else out, *last)


def rounds_its_state(kind: str, x: Tensor) -> bool:
    """Say whether torch's kernel carries a low-precision state between steps that autocast keeps in fp32."""
    return kind == "gru" and x.device.type == "cpu" and x.dtype.itemsize == 2


def _in_layers(
    kind: str, x: Tensor, hidden: Tensors, params: Tensors, how: How, dropout: float, ours: bool
) -> list[Tensor]:
    """Run layer after layer, with dropout in between; ``ours``: by our functions for one layer in one direction."""
    has_biases, layers, bidirectional = how
    lasts: list[list[Tensor]] = []
    count = len(params) // layers
    for layer, states in enumerate(zip(*(h.chunk(layers) for h in hidden), strict=True)):
        if layer and dropout:
            x = F.dropout(x, dropout)
        own = params[layer * count : (layer + 1) * count]
        x, *last = (_by_layer if ours else _at_once)(kind, x, states, own, (has_biases, 1, bidirectional))
        lasts.append(last)
    return [x, *(torch.cat(states) for states in zip(*lasts, strict=True))]


def _by_layer(kind: str, x: Tensor, hidden: Tensors, params: Tensors, how: How) -> list[Tensor]:
    """Run one LSTM or GRU layer by functions that save what their backwards read."""
    has_biases, _, bidirectional = how
    x, count = x.contiguous(), len(params) // (1 + bidirectional)
    found: list[tuple[Tensor, ...]] = []
    for way in range(1 + bidirectional):
        w_ih, w_hh, *biases = params[way * count : (way + 1) * count]
        h, *c = (state[way].contiguous() for state in hidden)
        if kind == "gru":
            b_ih, b_hh = biases or [w_ih.new_zeros(w_ih.shape[0]) for _ in range(2)]
            found.append(gru_layer(x, w_ih, w_hh, b_ih, b_hh, h, way == 1))
            continue
        b_ih, b_hh = biases or [torch.zeros_like(w_ih), torch.zeros_like(w_hh)]
        found.append(lstm_layer(x, w_ih, w_hh, b_ih, b_hh, h, c[0], way == 1, has_biases, bidirectional))
    outs, *lasts = zip(*found, strict=True)
    return [outs[0] if len(outs) == 1 else torch.cat(outs, -1), *(torch.stack(last) for last in lasts)]


def _at_once(kind: str, x: Tensor, hidden: Tensors, params: Tensors, how: How) -> list[Tensor]:
    """Run all layers, without dropout, as one operator."""
    results = 1 + len(hidden)

    def by_torch(*given: Tensor) -> tuple[Tensor, ...]:
        # cuDNN differentiates only what was run in training mode.
        return _run(kind, given[0], given[1:results], given[results:], *how, train=x.device.type == "cuda")

    def back(grads: Tensors, need: Sequence[bool], given: Tensors, _: Tensors) -> list[Tensor | None]:
        apart = given[0], list(given[1:results]), list(given[results:])
        made = iter(OPS.recurrent_backward(list(grads), list(need), kind, *apart, *how))
        return [next(made) if needed else None for needed in need]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = OPS.recurrent(kind, given[0], list(given[1:results]), list(given[results:]), *how)
        return found

    kernels = Kernels(run, back, by_torch, results)
    if runs_by_cudnn(x, hidden, params):
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *hidden, *params))
        kernels = cudnn_layers(kind, *how[1:], trains, len(hidden), by_torch)
    return list(differentiable(kernels, x, *hidden, *params))


def _run(kind: str, x: Tensor, hidden: Tensors, params: Tensors, *how: Any, train: bool = False) -> tuple[Tensor, ...]:
    has_biases, num_layers, bidirectional = how
    states = hidden if kind == "lstm" else hidden[0]
    found: tuple[Tensor, ...] = KINDS[kind](x, states, params, has_biases, num_layers, 0.0, train, bidirectional, False)
    return found


def _recurrent(kind: str, x: Tensor, hidden: list[Tensor], params: list[Tensor], *how: Any) -> tuple[Tensor, ...]:
    """Run the layers; returns three tensors, of which the last is empty if there is no cell state."""
    found = [t.contiguous() for t in _run(kind, x, hidden, params, *how)]
    return (*found, x.new_empty(0)) if len(found) < 3 else tuple(found)


def _recurrent_fake(kind: str, x: Tensor, hidden: list[Tensor], params: list[Tensor], *how: Any) -> tuple[Tensor, ...]:
    length, batch = x.shape[:2]
    out = x.new_empty(length, batch, hidden[0].shape[-1] * (2 if how[-1] else 1))
    states = [h.new_empty(h.shape) for h in hidden]
    return (out, *states) if len(states) == 2 else (out, *states, x.new_empty(0))


def _backward(
    grads: list[Tensor],
    needed: list[bool],
    kind: str,
    x: Tensor,
    hidden: list[Tensor],
    params: list[Tensor],
    *how: Any,
) -> list[Tensor]:
    """Return the gradients of those of ``x``, ``hidden`` and ``params`` that are ``needed``, by another forward."""
    given = [x, *hidden, *params]
    with autograd_inside():
        given = [t.detach().requires_grad_(need) for t, need in zip(given, needed, strict=True)]
        count = 1 + len(hidden)
        # cuDNN differentiates only what was run in training mode.
        outs = _run(kind, given[0], given[1:count], given[count:], *how, train=x.device.type == "cuda")
        wanted = [t for t, need in zip(given, needed, strict=True) if need]
        found = torch.autograd.grad(outs, wanted, grads, allow_unused=True)
    return [(torch.zeros_like(t) if g is None else g).contiguous() for t, g in zip(wanted, found, strict=True)]


_GIVEN = "str kind, Tensor x, Tensor[] hidden, Tensor[] params, bool has_biases, int num_layers, bool bidirectional"
define_operator(f"recurrent({_GIVEN}) -> (Tensor, Tensor, Tensor)", _recurrent, _recurrent_fake)
define_operator(
    f"recurrent_backward(Tensor[] grads, bool[] needed, {_GIVEN}) -> Tensor[]",
    _backward,
    lambda grads, needed, kind, x, hidden, params, *_: [
        t.new_empty(t.shape) for t, need in zip([x, *hidden, *params], needed, strict=True) if need
    ],
)

"""Recurrent layers of cuDNN, as operators that a graph with its own backward can hold.

Before: ``torch.lstm(x, (h, c), weights, ...)``, which expects the weights in one flat buffer: it warns if they are not,
and no tracer can capture it.
After: ``amp_graph::cudnn_rnn``, which flattens them, and ``amp_graph::cudnn_rnn_backward``. Source:
aten/src/ATen/native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_graph.passes.backends.recurrent.layer_kernels import Kernels
from amp_graph.passes.graph.node_info import FLOATS
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.torch_compat.operators import foreach_copy_

ATEN = torch.ops.aten
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def runs_by_cudnn(x: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Say whether ``torch.lstm`` and similar run cuDNN's kernels on these tensors, without projections."""
    tensors = (*hidden, *params)
    return (
        x.device.type == "cuda"
        and bool(torch.backends.cudnn.enabled)
        and torch.backends.cudnn.is_available()
        and x.dtype in FLOATS
        and all(t.device == x.device and t.dtype == x.dtype for t in tensors)
        and all(h.shape == hidden[0].shape for h in hidden)
    )


def cudnn_layers(
    kind: str, layers: int, bidirectional: bool, trains: bool, states: int, by_torch: Callable[..., Any]
) -> Kernels:
    """Return the kernels of all layers, without dropout: cuDNN's, with the same rounding as torch's call of it.

    kind: "lstm", "gru", "rnn_tanh", "rnn_relu"; states: how many of the tensors after ``x`` ([length, batch, width])
    are initial states, each [layers * directions, batch, size]. trains: whether there will be a backward, for which
    cuDNN reserves what it needs. Results: the output and the last states.
    """

    def contiguous(given: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x, *hidden = (t.contiguous() for t in given[: 1 + states])
        return x, hidden, list(given[1 + states :])

    def run(*given: Tensor) -> Any:
        return OPS.cudnn_rnn(kind, *contiguous(given), layers, bidirectional, trains)

    def back(grads: Sequence[Tensor], _: Any, given: Sequence[Tensor], kept: Sequence[Tensor]) -> Any:
        seeds = [g.contiguous() for g in grads]
        return OPS.cudnn_rnn_backward(seeds, kind, *contiguous(given), layers, bidirectional, *kept)

    return Kernels(run, back, by_torch, 1 + states, keeps=(0, 3, 4))


def _options(kind: str, hidden: Sequence[Tensor], layers: int, bidirectional: bool, trains: bool) -> tuple[Any, ...]:
    """Return the arguments of cuDNN after the tensors: no projection, no dropout, no packed sequence."""
    return MODES[kind], hidden[0].shape[-1], 0, layers, False, 0.0, trains, bidirectional, [], None


def _states(hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return hidden[0], hidden[1] if len(hidden) > 1 else None


def _per_layer(params: Sequence[Tensor], layers: int, bidirectional: bool) -> int:
    return len(params) // (layers * (2 if bidirectional else 1))


def _forward(
    kind: str, x: Tensor, hidden: list[Tensor], params: list[Tensor], layers: int, bidirectional: bool, trains: bool
) -> tuple[Tensor, ...]:
    """Return output, last states, and what backward reads: cuDNN's reserve, and the flattened weights."""
    options = _options(kind, hidden, layers, bidirectional, trains)
    stride = _per_layer(params, layers, bidirectional)
    weights = [p.view_as(p) for p in params]  # declared as parts of one flat buffer; cuDNN warns without a buffer
    mode, size, no_projection, *_ = options
    piece = ATEN._cudnn_rnn_flatten_weight(
        weights, stride, x.shape[-1], mode, size, no_projection, layers, False, bidirectional
    )
    out, h, c, reserve, weights = ATEN._cudnn_rnn(x, weights, stride, piece, *_states(hidden), *options)
    return out, h, c if len(hidden) > 1 else x.new_empty(0), reserve, weights


def _backward(
    grads: list[Tensor],
    kind: str,
    x: Tensor,
    hidden: list[Tensor],
    params: list[Tensor],
    layers: int,
    bidirectional: bool,
    out: Tensor,
    reserve: Tensor,
    weights: Tensor,
) -> list[Tensor]:
    """Return the gradients of ``x``, the initial states and the parameters; copies ``reserve``, which cuDNN writes."""
    options, stride = _options(kind, hidden, layers, bidirectional, True), _per_layer(params, layers, bidirectional)
    h, c = _states(hidden)
    dout, dh, *dc = grads
    mask = [True, True, bool(dc), True]  # cuDNN rejects requests for gradients that the kind does not have
    dx, dh0, dc0, dparams = ATEN._cudnn_rnn_backward(
        x, params, stride, weights, h, c, out, dout, dh, dc[0] if dc else None, *options, reserve.clone(), mask
    )
    # Weight gradients are parts of one buffer: separate tensors here, as operators must return them, by one call.
    made = [torch.empty_like(g) for g in dparams]
    foreach_copy_(made, dparams)
    return [dx, dh0, *([dc0] if dc else []), *made]


def _forward_fake(
    kind: str, x: Tensor, hidden: list[Tensor], params: list[Tensor], layers: int, bidirectional: bool, trains: bool
) -> tuple[Tensor, ...]:
    out = x.new_empty(*x.shape[:2], hidden[0].shape[-1] * (2 if bidirectional else 1))
    states = [h.new_empty(h.shape) for h in hidden] + [x.new_empty(0)] * (2 - len(hidden))
    # Only cuDNN knows the sizes of these two; only its backward reads them.
    kept = x.new_empty(0, dtype=torch.uint8), x.new_empty(sum(p.numel() for p in params))
    return (out, *states, *kept)


_GIVEN = "str kind, Tensor x, Tensor[] hidden, Tensor[] params, int num_layers, bool bidirectional"
define_operator(
    f"cudnn_rnn({_GIVEN}, bool trains) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _forward, _forward_fake
)
define_operator(
    f"cudnn_rnn_backward(Tensor[] grads, {_GIVEN}, Tensor out, Tensor reserve, Tensor weights) -> Tensor[]",
    _backward,
    lambda grads, kind, x, hidden, params, *_: [t.new_empty(t.shape) for t in (x, *hidden, *params)],
)

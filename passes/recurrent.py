"""LSTM layers of oneDNN in a graph that holds its own backward.

Before: ``aten::mkldnn_rnn_layer`` without autograd makes no workspace, and the backward beside it has nothing to read.
After: ``amp_graph::mkldnn_rnn_layer`` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.operators import OPS, define_operator
from amp_graph.passes.torch_private import outside_modes

PLAIN = torch.ops.aten.mkldnn_rnn_layer.default
LSTM = 2  # ideep::rnn_kind::LSTM


def make_workspaces(gm: GraphModule) -> None:
    """Let the recurrent layers of a traced step, which runs without autograd, make what their backward reads."""
    for node in gm.graph.find_nodes(op="call_function", target=PLAIN):
        node.target = OPS.mkldnn_rnn_layer.default


def onednn_trains(x: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Say whether ``torch.lstm`` runs oneDNN's kernel on these tensors, and that in sizes known while it is traced.

    Source: use_mkldnn in aten/src/ATen/native/RNN.cpp. fp16 is left out: its backward has no kernel.
    """
    tensors = [x, *hidden, *params]
    sizes = [n for t in tensors for n in t.shape]
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and all(t.device.type == "cpu" and t.dtype == x.dtype for t in tensors)
        and x.dtype in (torch.float32, torch.bfloat16)
        and all(type(n) is int and n > 0 for n in sizes)
        and hidden[0].shape == hidden[1].shape
    )


def lstm_layer(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    h: Tensor,
    c: Tensor,
    reverse: bool,
    has_biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and last states of one LSTM layer in one direction, by oneDNN's kernels in both passes.

    x: [length, batch, width], contiguous; h, c: [batch, size]. The calls are those that ``torch.lstm`` comes to.
    """
    found: tuple[Tensor, Tensor, Tensor] = _LstmLayer.apply(
        x, w_ih, w_hh, b_ih, b_hh, h, c, reverse, has_biases, bidirectional
    )
    return found


class _LstmLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        tensors, (reverse, has_biases, bidirectional) = given[:7], given[7:]
        size = tensors[5].shape[-1]
        *found, workspace = OPS.mkldnn_rnn_layer(
            *tensors, reverse, [], LSTM, size, 1, has_biases, bidirectional, False, True
        )
        ctx.how = given[7:]
        ctx.save_for_backward(*tensors, *found, workspace)
        return found[0], found[1], found[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *tensors, workspace = ctx.saved_tensors
        reverse, has_biases, bidirectional = ctx.how
        size = tensors[5].shape[-1]
        options = (reverse, LSTM, size, 1, has_biases, True, bidirectional, [], False)
        found = torch.ops.aten.mkldnn_rnn_layer_backward(*tensors, *grads, *options, workspace)
        # fp32, whatever came in; what autograd casts, a traced graph has to say.
        made = [g.to(t.dtype) if n else None for g, t, n in zip(found, tensors, ctx.needs_input_grad, strict=False)]
        return *made, None, None, None


def _rnn_layer(*given: Any) -> Any:
    """Run the layer as where gradients are recorded, which is what the kernel makes its workspace for."""
    with torch.enable_grad():
        return PLAIN(*(g.detach() if isinstance(g, Tensor) else g for g in given))


def _fake(*given: Any) -> Any:
    """Return what torch's own fake does, with a workspace of the size that the kernel makes."""
    *found, workspace = PLAIN(*given)
    x, flags = given[0], given[7:]
    sizes = (tuple(x.shape), tuple(given[1].shape), tuple(given[5].shape))
    if any(type(n) is not int for one in sizes for n in one):
        return *found, workspace
    count = _workspace_bytes(*sizes, x.dtype, tuple(tuple(f) if isinstance(f, list) else f for f in flags))
    return *found, workspace.new_empty(count)


@lru_cache(maxsize=256)
def _workspace_bytes(x: Any, w_ih: Any, h: Any, dtype: torch.dtype, flags: Any) -> int:
    """Ask the kernel, by a run on zeros: oneDNN alone knows, and a compiler wants the sizes of all there is."""
    with outside_modes():
        gates = w_ih[0]
        sizes = [x, w_ih, (gates, h[-1]), (gates,), (gates,), h, h]
        tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        found: Tensor = _rnn_layer(*tensors, *(list(f) if isinstance(f, tuple) else f for f in flags))[3]
        return found.numel()


define_operator(str(PLAIN._schema).removeprefix("aten::"), _rnn_layer, _fake)

"""LSTM layers that train by compiled C; and those of oneDNN in a traced step, which holds its own backward.

Before: ``aten::mkldnn_rnn_layer`` without autograd makes no workspace, so the backward in the graph has nothing to
read.
After: ``amp_graph::mkldnn_rnn_layer`` makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.backends.recurrent.lstm_kernel import library
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import fake_mode_of, run_node
from amp_graph.passes.native.gemm_thresholds import lstm_kernel_is_profitable
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.torch_compat.autograd import gradients_by_torch, is_plain, leaves_to_torch
from amp_graph.passes.torch_compat.fake import outside_modes

PLAIN = torch.ops.aten.mkldnn_rnn_layer.default
WORKSPACE = 3  # index of the workspace among the kernel's results


def make_workspaces(gm: GraphModule) -> None:
    """Let the recurrent layers of a traced step, which runs without autograd, make the workspace for their backward."""
    mode = fake_mode_of(gm)
    for node in gm.graph.find_nodes(op="call_function", target=PLAIN):
        if mode is not None and any(user.args[1] == WORKSPACE for user in node.users):
            node.target = OPS.mkldnn_rnn_layer.default
            made = run_node(node, mode)
            set_value(node, made)
            for part in node.users:
                set_value(part, made[part.args[1]])


def trains_by_kernel(x: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Say whether compiled C is faster for an LSTM on these tensors, without projections, of sizes known by now."""
    tensors = [x, *hidden, *params]
    return (
        all(t.device.type == "cpu" and t.dtype == x.dtype for t in tensors)
        and all(type(n) is int and n > 0 for t in tensors for n in t.shape)
        and hidden[0].shape == hidden[1].shape
        and is_faster_than_onednn(x.device.type, x.dtype, *hidden[0].shape[-2:])
    )


def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and last states of one LSTM layer in one direction, by compiled C.

    x: [length, batch, width], contiguous; h, c: [batch, size]; weights and biases as in ``nn.LSTM``; all bf16.
    """
    given = (x, w_ih, w_hh, b_ih, b_hh, h, c)
    if leaves_to_torch(*given):
        return _by_torch(*given, reverse)
    found: tuple[Tensor, Tensor, Tensor] = _LstmByKernel.apply(*given, reverse)
    return found


def _by_torch(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by torch's own operations."""
    given = x.flip(0) if reverse else x
    out, *last = torch.lstm(given, (h[None], c[None]), [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, False)
    return out.flip(0) if reverse else out, last[0][0], last[1][0]


def is_faster_than_onednn(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM layer in training with ``batch`` states of ``size`` is faster by compiled C."""
    return lstm_kernel_is_profitable(device, dtype, batch, size) and library() is not None


class _LstmByKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, h, c, *kept = OPS.lstm_forward(*given)
        ctx.reverse = given[7]
        ctx.save_for_backward(*given[:7], out, *kept)
        return out, h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w_ih, w_hh, b_ih, b_hh, h, c, *kept = ctx.saved_tensors
        if is_plain(*grads):
            again = functools.partial(_by_torch, reverse=ctx.reverse)
            tensors = (x, w_ih, w_hh, b_ih, b_hh, h, c)
            return *gradients_by_torch(again, tensors, ctx.needs_input_grad[:7], grads), None
        made = OPS.lstm_backward_of_sums(*grads, x, w_ih, w_hh, h, *kept, ctx.reverse)
        return *(g if n else None for g, n in zip(made, ctx.needs_input_grad, strict=False)), None


def _rnn_layer(*given: Any) -> Any:
    """Run the layer with gradients recorded, which makes the kernel create its workspace."""
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


@functools.lru_cache(maxsize=256)
def _workspace_bytes(x: Any, w_ih: Any, h: Any, dtype: torch.dtype, flags: Any) -> int:
    """Return the workspace size, by a run on zeros: only oneDNN knows it, and a compiler needs all sizes."""
    with outside_modes():
        gates = w_ih[0]
        sizes = [x, w_ih, (gates, h[-1]), (gates,), (gates,), h, h]
        tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        found: Tensor = _rnn_layer(*tensors, *(list(f) if isinstance(f, tuple) else f for f in flags))[3]
        return found.numel()


define_operator(str(PLAIN._schema).removeprefix("aten::"), _rnn_layer, _fake)

"""LSTM layers of oneDNN in a graph that holds its own backward, and faster ones.

Before: ``aten::mkldnn_rnn_layer`` without autograd makes no workspace, so the backward in the graph has nothing to
read.
After: ``amp_graph::mkldnn_rnn_layer`` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from amp_graph.passes.backends.recurrent.layer_kernels import Kernels, differentiable
from amp_graph.passes.backends.recurrent.lstm_kernel import library
from amp_graph.passes.graph.edit import set_value
from amp_graph.passes.graph.fake_values import fake_mode_of, run_node
from amp_graph.passes.native.gemm_thresholds import lstm_kernel_is_profitable
from amp_graph.passes.native.operator_library import OPS, define_operator
from amp_graph.passes.torch_compat import keeps_lstm_workspaces
from amp_graph.passes.torch_compat.autograd import leaves_to_torch
from amp_graph.passes.torch_compat.devices import onednn_takes_bf16
from amp_graph.passes.torch_compat.fake import outside_modes

PLAIN = torch.ops.aten.mkldnn_rnn_layer.default
LSTM = 2  # ideep::rnn_kind::LSTM
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


def onednn_trains(x: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> bool:
    """Say whether ``torch.lstm`` runs oneDNN's kernel on these tensors, with sizes known at trace time.

    Where no workspace survives, only layers whose backward needs none. fp16 is excluded: its backward has no kernel.
    Source: use_mkldnn in aten/src/ATen/native/RNN.cpp.
    """
    tensors = [x, *hidden, *params]
    sizes = [n for t in tensors for n in t.shape]
    return (
        torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(t.device.type == "cpu" and t.dtype == x.dtype for t in tensors)
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and onednn_takes_bf16()))
        and all(type(n) is int and n > 0 for n in sizes)
        and hidden[0].shape == hidden[1].shape
        and (keeps_lstm_workspaces() or is_faster_than_onednn(x.device.type, x.dtype, *hidden[0].shape[-2:]))
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
    """Return output and last states of one LSTM layer in one direction, by oneDNN's kernels, as ``torch.lstm`` does.

    x: [length, batch, width], contiguous; h, c: [batch, size]. Uses compiled C where that is faster.
    """
    given = (x, w_ih, w_hh, b_ih, b_hh, h, c)
    if leaves_to_torch(*given):
        return _by_torch(*given, reverse, has_biases)
    compiled = is_faster_than_onednn(x.device.type, x.dtype, *h.shape)
    if compiled and not has_biases:  # wrapper tensors do not tell
        b_ih = b_hh = w_ih.new_zeros(w_ih.shape[0])
    kernels = kernels_of(h.shape[-1], reverse, has_biases, bidirectional, compiled=compiled)
    out, last_h, last_c = differentiable(kernels, x, w_ih, w_hh, b_ih, b_hh, h, c)
    return out, last_h, last_c


def _by_torch(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    h: Tensor,
    c: Tensor,
    reverse: bool,
    has_biases: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by torch's own operations."""
    params = [w_ih, w_hh, b_ih, b_hh] if has_biases else [w_ih, w_hh]
    given = x.flip(0) if reverse else x
    out, *last = torch.lstm(given, (h[None], c[None]), params, has_biases, 1, 0.0, False, False, False)
    return out.flip(0) if reverse else out, last[0][0], last[1][0]


def is_faster_than_onednn(device: str, dtype: torch.dtype, batch: int, size: int) -> bool:
    """Say whether an LSTM layer in training with ``batch`` states of ``size`` is faster by compiled C."""
    return lstm_kernel_is_profitable(device, dtype, batch, size) and library() is not None


def kernels_of(size: int, reverse: bool, has_biases: bool, bidirectional: bool, *, compiled: bool) -> Kernels:
    """Return the kernels of ``lstm_layer`` with states of ``size``: compiled C, or oneDNN's."""
    options: tuple[Any, ...] = reverse, [], LSTM, size, 1, has_biases, bidirectional, False, True
    by_torch = lambda *given: PLAIN(*given, *options)[:3]  # noqa: E731
    if compiled:
        return Kernels(
            lambda *given: OPS.lstm_forward(*given, reverse),
            lambda grads, _, given, kept: OPS.lstm_backward_of_sums(*grads, *given[:3], given[5], *kept, reverse),
            by_torch,
            results=3,
            keeps=(0, 3, 4),
        )

    def back(grads: Sequence[Tensor], need: Sequence[bool], given: Sequence[Tensor], kept: Sequence[Tensor]) -> Any:
        *found, workspace = kept
        backward: Any = torch.ops.aten.mkldnn_rnn_layer_backward
        flags: tuple[Any, ...] = (reverse, LSTM, size, 1, has_biases, True, bidirectional, [], False)
        made = backward(*given, *found, *grads, *flags, workspace)
        # fp32, whatever the inputs were; autograd casts implicitly, a traced graph must do so explicitly
        return [g.to(t.dtype) if needed else None for g, t, needed in zip(made, given, need, strict=True)]

    run = lambda *given: OPS.mkldnn_rnn_layer(*given, *options)  # noqa: E731
    return Kernels(run, back, by_torch, results=3, keeps=(0, 1, 2, 3))


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


@lru_cache(maxsize=256)
def _workspace_bytes(x: Any, w_ih: Any, h: Any, dtype: torch.dtype, flags: Any) -> int:
    """Return the workspace size, by a run on zeros: only oneDNN knows it, and a compiler needs all sizes."""
    with outside_modes():
        gates = w_ih[0]
        sizes = [x, w_ih, (gates, h[-1]), (gates,), (gates,), h, h]
        tensors = [torch.zeros(size, dtype=dtype) for size in sizes]
        found: Tensor = _rnn_layer(*tensors, *(list(f) if isinstance(f, tuple) else f for f in flags))[3]
        return found.numel()


define_operator(str(PLAIN._schema).removeprefix("aten::"), _rnn_layer, _fake)

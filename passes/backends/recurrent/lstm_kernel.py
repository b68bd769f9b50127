"""An LSTM layer in training by compiled C: its forward, and the step-by-step part of its backward.

Before: ``aten::mkldnn_rnn_layer`` and its backward.
After: ``amp_graph::lstm_forward``, which saves the gates' sums and the cells, and ``amp_graph::lstm_backward_of_sums``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from amp_graph.passes.backends.cpu.linear.amx_gemm import gradients_of_linear
from amp_graph.passes.backends.cpu.linear.panel_gemm import OF_AN_ELEMENT, panels_of
from amp_graph.passes.native.jit_compiler import threads_at_once
from amp_graph.passes.native.kernel_table import STRUCT, best, kernel, required, run
from amp_graph.passes.native.operator_library import OPS as OPS  # for whoever calls what is defined here
from amp_graph.passes.native.operator_library import define_as_typed

SOURCE = Path(__file__).with_name("lstm_kernel.c")
GATES = 4

# The compiled kernel; None where nothing can be compiled, or the CPU lacks dot products of bf16.
library = kernel("lstm", lambda low: best(SOURCE), {"forward": (STRUCT,), "backward": (STRUCT,)})


def lstm_forward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool
) -> list[Tensor]:
    """Return output and last states of one layer in one direction; and what backward reads, in the order of its steps.

    x: [length, batch, width]; h, c: [batch, size]; weights and biases as in ``nn.LSTM``, all bf16. After the three come
    the sums of the gates, bf16 [length, batch, 4 * size], and the cells, fp32 [length + 1, batch, size]. Sums, gates
    and cells are fp32; states are rounded once per step. Raises MemoryError.
    """
    x = (x.flip(0) if reverse else x).contiguous()
    (length, batch, width), size = x.shape, h.shape[1]
    out, sums = x.new_empty(length, batch, size), x.new_empty(length, batch, GATES * size)
    cells = x.new_empty(length + 1, batch, size, dtype=torch.float32)
    cells[0], h = c, h.contiguous()
    bias = b_ih.float() + b_hh.float()
    _run("forward", (length, batch, width, size), x, panels_of(w_ih), panels_of(w_hh), h, bias, sums, out, cells)
    last_h, last_c = out[-1].clone(), cells[-1].to(x.dtype)
    return [out.flip(0) if reverse else out, last_h, last_c, sums, cells]


def lstm_backward_of_sums(
    dout: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    h: Tensor,
    out: Tensor,
    sums: Tensor,
    cells: Tensor,
    reverse: bool,
) -> list[Tensor]:
    """Return the gradients of ``x``, the weights, the biases, ``h`` and ``c``, of their shapes, bf16.

    dout: of ``out``, [length, batch, size]; dh, dc: of the last states; the rest as ``lstm_forward`` took and made it.
    Gradients of gates and cells are fp32 in a step, those of the gates' sums rounded once. Raises MemoryError.
    """
    if reverse:
        x, out, dout = x.flip(0), out.flip(0), dout.flip(0)
    (length, batch, size), low = out.shape, x.dtype
    dsums, dh, dc = torch.empty_like(sums), *(t.float().clone(memory_format=torch.contiguous_format) for t in (dh, dc))
    turned = panels_of(w_hh.t().contiguous())
    _run("backward", (length, batch, size), sums, dout.contiguous(), turned, cells, dsums, dh, dc)
    flat = dsums.view(length * batch, GATES * size)
    dx = (flat @ w_ih).view(x.shape)
    dw_ih, dbias = gradients_of_linear(flat, x.flatten(0, 1), biased=True)
    dw_hh, _ = gradients_of_linear(flat, torch.cat([h[None], out[:-1]]).view(length * batch, size), biased=False)
    assert dbias is not None, "asked for"
    return [dx.flip(0) if reverse else dx, dw_ih, dw_hh, dbias, dbias.clone(), dh.to(low), dc.to(low)]


def _run(name: str, sizes: tuple[int, ...], *tensors: Tensor) -> None:
    threads = threads_at_once(sizes[1] * GATES * sizes[-1] * sizes[-1] // OF_AN_ELEMENT)
    run(getattr(required(library()), name), f"an LSTM of {sizes[1]} x {sizes[-1]}", (*sizes, *tensors, threads))


def _made(x: Tensor, h: Tensor) -> list[Tensor]:
    (length, batch, _), size = x.shape, h.shape[1]
    out, sums = x.new_empty(length, batch, size), x.new_empty(length, batch, GATES * size)
    states = [x.new_empty(batch, size) for _ in range(2)]
    return [out, *states, sums, x.new_empty(length + 1, batch, size, dtype=torch.float32)]


def _gradients(x: Tensor, w_ih: Tensor, w_hh: Tensor, h: Tensor) -> list[Tensor]:
    biases = [w_ih.new_empty(w_ih.shape[0]) for _ in range(2)]
    return [*(t.new_empty(t.shape) for t in (x, w_ih, w_hh)), *biases, *(h.new_empty(h.shape) for _ in range(2))]


define_as_typed(lstm_forward, _made)
define_as_typed(lstm_backward_of_sums, _gradients)

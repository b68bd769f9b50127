"""The gradients of an LSTM layer as few large matmuls, where oneDNN's backward takes a multiple of its forward's time.

Before: ``aten::mkldnn_rnn_layer_backward(...)``, which reads a workspace of the forward.
After: ``amp_graph::lstm_backward(...)``, which reads only input, weights and output. The output holds the initial state
of each step, so one matmul recomputes the gates of all steps, and two make the gradients of input and weights. Only the
state's gradient goes step by step (Appleyard, Kocisky, Blunsom, "Optimizing Performance of Recurrent Neural Networks on
GPUs", 2016).
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_graph.passes.torch_compat.onednn import linear_of_packed_weight, pack_linear_weight

SIGMOID, TANH = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input


def lstm_backward(
    dout: Tensor,
    dh: Tensor,
    dc: Tensor,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    h: Tensor,
    c: Tensor,
    out: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of ``x``, the weights, the biases, ``h`` and ``c``, of their shapes and dtypes.

    x: [length, batch, width]; out, dout: [length, batch, size]; h, c, dh, dc: [batch, size], initial states, and
    gradients of the last; weights and biases as in ``nn.LSTM``. Matmuls have the dtype of ``x`` and fp32 sums; gates,
    cell states and their gradients are fp32.
    """
    if reverse:
        x, out, dout = x.flip(0), out.flip(0), dout.flip(0)
    low, (length, batch, size) = x.dtype, out.shape
    seen = torch.cat([x, torch.cat([h[None], out[:-1]])], -1).flatten(0, 1)
    gates = (seen @ torch.cat([w_ih, w_hh], 1).t()).float().add_(b_ih.float() + b_hh.float())
    gates = gates.view(length, batch, 4, size)
    cells = _cells(gates, c)
    dgates, dh, dc = _steps(gates, cells, dout.float(), dh.float(), dc.float(), w_hh)
    flat = dgates.view(length * batch, 4 * size)
    dx = (flat @ w_ih).view(x.shape)
    dweights = flat.t() @ seen
    dbias = flat.sum(0, dtype=torch.float32).to(low)
    width = x.shape[-1]
    dw_ih, dw_hh = dweights[:, :width].contiguous(), dweights[:, width:].contiguous()
    return dx.flip(0) if reverse else dx, dw_ih, dw_hh, dbias, dbias.clone(), dh.to(low), dc.to(low)


def _cells(gates: Tensor, c: Tensor) -> Tensor:
    """Turn sums into gates in place, and return the cell states: the initial one, then that after each step."""
    gates[:, :, :2].sigmoid_()
    gates[:, :, 2].tanh_()
    gates[:, :, 3].sigmoid_()
    length, batch, _, size = gates.shape
    cells = gates.new_empty(length + 1, batch, size)
    cells[0] = c
    for t in range(length):
        i, f, g, _ = gates[t].unbind(1)
        torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
    return cells


def _steps(
    gates: Tensor, cells: Tensor, dout: Tensor, dh: Tensor, dc: Tensor, w_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Go back step by step; return the gradients of the gates' sums, in the dtype of ``w_hh``, and of initial states.

    All that one step reads and writes fits in a core's cache.
    """
    length, batch, _, size = gates.shape
    back = pack_linear_weight(w_hh.t().contiguous())
    dgates = gates.new_empty(length, batch, 4 * size, dtype=w_hh.dtype)
    made, one, tanh = gates.new_empty(batch, 4, size), *(gates.new_empty(batch, size) for _ in range(2))
    di, df, dg, do = made.unbind(1)
    dc = dc.clone()
    for t in range(length - 1, -1, -1):
        i, f, g, o = gates[t].unbind(1)
        dh = dh + dout[t]
        torch.tanh(cells[t + 1], out=tanh)
        SIGMOID(torch.mul(dh, tanh, out=one), o, grad_input=do)
        dc += TANH(torch.mul(dh, o, out=one), tanh, grad_input=one)
        SIGMOID(torch.mul(dc, g, out=one), i, grad_input=di)
        SIGMOID(torch.mul(dc, cells[t], out=one), f, grad_input=df)
        TANH(torch.mul(dc, i, out=one), g, grad_input=dg)
        dgates[t] = made.view(batch, 4 * size)
        dh = linear_of_packed_weight(dgates[t], back, None).float()
        dc.mul_(f)
    return dgates, dh, dc

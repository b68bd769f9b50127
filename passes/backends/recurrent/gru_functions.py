"""A low-precision GRU layer that carries its state in fp32, as ``torch.autocast`` does.

Before: ``torch.gru(...)`` of bf16 tensors, which rounds the state at every step.
After: ``gru_layer(...)``: matmuls are bf16; gates, states and their gradients fp32. The gradients of weights and input
are one matmul each, over all steps (Appleyard, Kocisky, Blunsom, "Optimizing Performance of Recurrent Neural Networks
on GPUs", 2016).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.recurrent.layer_kernels import Kernels, differentiable
from amp_graph.passes.native.operator_library import OPS, define_as_typed
from amp_graph.passes.torch_compat.autograd import leaves_to_torch
from amp_graph.passes.torch_compat.devices import linear_of_packed_weight, multiplies_bf16, pack_linear_weight

SIGMOID, TANH = torch.ops.aten.sigmoid_backward.grad_input, torch.ops.aten.tanh_backward.grad_input


def gru_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return output [length, batch, size] and last state [batch, size] of one GRU layer in one direction.

    x: [length, batch, width]; h: [batch, size]; weights and biases as in ``nn.GRU``; all of one low precision, as are
    the results.
    """
    given = (x, w_ih, w_hh, b_ih, b_hh, h)
    if leaves_to_torch(*given):
        return _by_torch(*given, reverse)
    run = functools.partial(OPS.gru_forward, reverse=reverse)
    back = lambda grads, _, tensors, kept: OPS.gru_backward(*grads, *tensors[:3], *kept, reverse)  # noqa: E731
    kernels = Kernels(run, back, functools.partial(_by_torch, reverse=reverse), results=2, keeps=(2, 3))
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    found: tuple[Tensor, ...] = differentiable(kernels, *given) if trains else run(*given)
    return found[0], found[1]


def gru_forward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, last state, all states [length + 1, batch, size] and gates [length, batch, 4, size], fp32.

    The gates are: reset, update, new, and the input of the reset gate. ``reverse``: the steps run from the end. Source:
    GRUCell in aten/src/ATen/native/RNN.cpp.
    """
    x = x.flip(0) if reverse else x
    length, batch, size = *x.shape[:2], h.shape[-1]
    gates = torch.empty(length, batch, 4, size)
    gates[:, :, :3] = F.linear(x, w_ih, b_ih).view(length, batch, 3, size)
    states = torch.empty(length + 1, batch, size)
    states[0] = h
    times, state = _times(w_hh, b_hh), states[0]
    # Views of all steps at once: for small states, making them step by step takes as long as the arithmetic.
    steps = (gates[:, :, :2].unbind(), *(part.unbind() for part in gates.unbind(2)), states[1:].unbind())
    for both, reset, update, new, through, after in zip(*steps, strict=True):
        seen = times(state.to(x.dtype)).view(batch, 3, size).float()
        both.add_(seen[:, :2]).sigmoid_()
        through.copy_(seen[:, 2])
        new.addcmul_(reset, through).tanh_()
        state = torch.lerp(new, state, update, out=after)
    out = states[1:].to(x.dtype)
    return out.flip(0) if reverse else out, states[-1].to(x.dtype), states, gates


def gru_backward(
    dout: Tensor,
    dlast: Tensor,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    states: Tensor,
    gates: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, the weights, the biases and the first state, in the dtype of ``x``."""
    if reverse:
        x, dout = x.flip(0), dout.flip(0)
    low, (length, batch, _, size) = x.dtype, gates.shape
    dseen, dnew, dh = _steps(gates, states, dout.float(), dlast.float(), w_hh)
    flat, before = dseen.view(length * batch, 3 * size), states[:-1].to(low).view(length * batch, size)
    dsums = torch.cat([flat[:, : 2 * size], dnew.view(length * batch, size)], 1)
    dx = (dsums @ w_ih).view(x.shape)
    db_ih, db_hh = (d.sum(0, dtype=torch.float32).to(low) for d in (dsums, flat))
    dw_ih, dw_hh = dsums.t() @ x.reshape(length * batch, x.shape[-1]), flat.t() @ before
    return dx.flip(0) if reverse else dx, dw_ih, dw_hh, db_ih, db_hh, dh.to(low)


def _steps(gates: Tensor, states: Tensor, dout: Tensor, dh: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Go back step by step; return the gradients of the state's matmul, of the new gate's sums, and of the state."""
    length, batch, _, size = gates.shape
    back = _times(w_hh.t(), None)
    dseen = gates.new_empty(length, batch, 3 * size, dtype=w_hh.dtype)
    dnew = gates.new_empty(length, batch, size, dtype=w_hh.dtype)
    made, one, other = gates.new_empty(batch, 3, size), *(gates.new_empty(batch, size) for _ in range(2))
    dreset, dupdate, dthrough = made.unbind(1)
    flat = made.view(batch, 3 * size)
    steps = (*(part.unbind() for part in gates.unbind(2)), states[:-1].unbind(), dout.unbind(), dseen.unbind())
    for reset, update, new, through, before, dstep, low, dlow in reversed(
        list(zip(*steps, dnew.unbind(), strict=True))
    ):
        dh = dh + dstep
        SIGMOID(torch.sub(before, new, out=one).mul_(dh), update, grad_input=dupdate)
        kept = dh * update
        TANH(torch.sub(dh, kept, out=one), new, grad_input=other)
        SIGMOID(torch.mul(other, through, out=one), reset, grad_input=dreset)
        torch.mul(other, reset, out=dthrough)
        dlow.copy_(other)
        dh = back(low.copy_(flat)).float().add_(kept)
    return dseen, dnew, dh


def _times(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies rows by ``weight`` [outputs, inputs], packed once where oneDNN can."""
    if weight.dtype != torch.bfloat16 or not multiplies_bf16():
        return lambda rows: F.linear(rows, weight, bias)
    packed = pack_linear_weight(weight.contiguous())
    return lambda rows: linear_of_packed_weight(rows, packed, bias)


def _by_torch(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return output and last state by torch's own operations."""
    given = x.flip(0) if reverse else x
    out, last = torch.gru(given, h[None], [w_ih, w_hh, b_ih, b_hh], True, 1, 0.0, False, False, False)
    return out.flip(0) if reverse else out, last[0]


def _fake_forward(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (length, batch), size = x.shape[:2], h.shape[-1]
    states = x.new_empty(length + 1, batch, size, dtype=torch.float32)
    gates = x.new_empty(length, batch, 4, size, dtype=torch.float32)
    return x.new_empty(length, batch, size), x.new_empty(batch, size), states, gates


def _fake_backward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    db_ih, db_hh = (w_ih.new_empty(w_ih.shape[0]) for _ in range(2))
    dh = x.new_empty(states.shape[1:])
    return x.new_empty(x.shape), w_ih.new_empty(w_ih.shape), w_hh.new_empty(w_hh.shape), db_ih, db_hh, dh


define_as_typed(gru_forward, _fake_forward)
define_as_typed(gru_backward, _fake_backward)

"""Calls that CUDA runs as one operator and the CPU as several, as operators that can be traced without a GPU.

Before: ``F.rms_norm(x, (n,), weight)``, eight operations on the CPU.
After: ``launch_counts::rms_norm``, in backward ``rms_norm_backward``, which run nowhere.

A recurrent layer is ``autocasts_rnn``, which ``torch.autocast`` casts into cuDNN's one buffer; where a pass of ours
runs it, it is that pass's ``amp_graph::cudnn_rnn``.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_graph.passes.backends.recurrent import rnn_functions
from amp_graph.passes.backends.recurrent.lower_rnn import CudnnRnn

LIBRARY = torch.library.Library("launch_counts", "DEF")


def _define(schema: str, shapes: Any) -> Any:
    name = LIBRARY.define(schema)
    torch.library.register_fake(f"launch_counts::{name}", shapes, lib=LIBRARY)
    return getattr(torch.ops.launch_counts, name).default


RMS_NORM = _define(
    "rms_norm(Tensor x, Tensor? weight, int over) -> (Tensor, Tensor)",
    lambda x, weight, over: (torch.empty_like(x), x.new_empty(x.shape[:-over], dtype=torch.float32)),
)
RMS_NORM_BACKWARD = _define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] mask) -> (Tensor, Tensor)",
    lambda grad, x, rstd, weight, mask: (torch.empty_like(x), torch.empty_like(x if weight is None else weight)),
)
RNN = _define(
    "autocasts_rnn(Tensor x, Tensor[] hidden, Tensor[] params, int ways) -> (Tensor, Tensor[])",
    lambda x, hidden, params, ways: (
        x.new_empty(*x.shape[:2], ways * hidden[0].shape[-1]), [torch.empty_like(h) for h in hidden]),
)  # fmt: skip
RNN_BACKWARD = _define(
    "autocasts_rnn_backward(Tensor[] grads, Tensor x, Tensor[] hidden, Tensor[] params, Tensor out) -> Tensor[]",
    lambda grads, x, hidden, params, out: [torch.empty_like(t) for t in (x, *hidden, *params)],
)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, over: int) -> Tensor:
        out, rstd = RMS_NORM(x, weight, over)
        ctx.save_for_backward(x, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        dx, dweight = RMS_NORM_BACKWARD(grad, x, rstd, weight, [*ctx.needs_input_grad[:2]])
        return dx, dweight if weight is not None else None, None


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: int, ways: int, x: Tensor, *tensors: Tensor) -> Any:
        out, last = RNN(x.contiguous(), tensors[:states], tensors[states:], ways)
        ctx.states = states
        ctx.save_for_backward(x, *tensors, out)
        return out, *last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *tensors, out = ctx.saved_tensors
        return (
            None,
            None,
            *RNN_BACKWARD([g.contiguous() for g in grads], x, tensors[: ctx.states], tensors[ctx.states :], out),
        )


class AsOnCuda(TorchFunctionMode):
    """Calls the operators of CUDA where the CPU has none of its own."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an RMS norm in one dtype, and recurrent layers."""
        given = kwargs or {}
        if function in (F.rms_norm, torch.rms_norm):
            x, shape = args[:2]
            weight = given.get("weight", args[2] if len(args) > 2 else None)
            if weight is None or weight.dtype == x.dtype:
                return _RmsNorm.apply(x, weight, len(shape))
        if function in rnn_functions.KINDS.values():
            return _recurrent(*args, **given)
        return function(*args, **given)


def _recurrent(x: Tensor, hidden: Any, params: Sequence[Tensor], *how: Any) -> Any:
    *_, bidirectional, batch_first = how
    states = (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)
    x = x.transpose(0, 1) if batch_first else x
    out, *last = _Rnn.apply(len(states), 2 if bidirectional else 1, x, *states, *params)
    return (out.transpose(0, 1) if batch_first else out, *last)


@contextlib.contextmanager
def with_cudnn() -> Iterator[None]:
    """Let passes and kernels take recurrent layers as those of CUDA."""
    answers = (CudnnRnn, "wants", True), (rnn_functions, "runs_by_cudnn", True), (rnn_functions, "onednn_trains", False)
    with contextlib.ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, lambda *_, answer=answer: answer))
        yield

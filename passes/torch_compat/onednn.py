"""Kernels of oneDNN and ATen without a public name.

Each states the versions of torch that it was checked on.
"""

from __future__ import annotations

from typing import Any

import torch

ONEDNN_RNN = "aten.mkldnn_rnn_layer"  # what an LSTM in fp32 is made of on the CPU; 2.11 - 2.13


def pack_linear_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` [outputs, inputs] in the layout of oneDNN's matmuls, which only they can read; 2.11 - 2.13."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


# Called as (x, weight, bias, "none" or a fused activation, [], its form); 2.11 - 2.13. A "relu" turns NaN into 0.
linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_linear_pointwise = linear_pointwise._op if linear_pointwise is not None else None


def linear_of_packed_weight(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, after: str = "none", form: str = ""
) -> torch.Tensor:
    """Return ``F.linear(x, weight, bias)`` for a packed ``weight``, with oneDNN's fused ``after``; 2.11 - 2.13.

    after: "none", "relu", which turns NaN into 0, "swish" or "gelu", the last in the ``form`` "none" or "tanh".
    """
    assert _linear_pointwise is not None, "nothing is packed without oneDNN"
    found: torch.Tensor = _linear_pointwise(x, packed, bias, after, [], form)
    return found


def pack_convolution_weight(weight: torch.Tensor, shape: Any, images: torch.Size) -> torch.Tensor:
    """Return a 2d convolution's ``weight`` in oneDNN's best layout for ``images`` of that size; 2.11 - 2.13."""
    pack: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    packed: torch.Tensor = pack(weight.to_mkldnn(), *where, list(images))
    return packed


_convolution_pointwise = torch.ops.mkldnn._convolution_pointwise if torch.backends.mkldnn.is_available() else None
_convolution_into = torch.ops.mkldnn._convolution_pointwise_.binary._op if _convolution_pointwise is not None else None


def convolution_pointwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    shape: Any,
    other: torch.Tensor | None,
    into: bool = False,
    activation: str = "none",
) -> torch.Tensor:
    """Return ``conv2d(x, weight, bias)``, plus ``other``, with ``activation``; 2.11 - 2.13.

    x, other: bf16, channels_last; weight: packed; bias: fp32, but bf16 with ``other``, as that kernel requires.
    ``into``: write the result over ``other``, with the same bits. activation: applied to the kernel's fp32 sums:
    "none", "relu", which turns NaN into 0, or, without ``other``, "swish" or "hardswish".
    """
    assert _convolution_pointwise is not None, "nothing is folded without oneDNN"
    assert _convolution_into is not None, "nothing is folded without oneDNN"
    where = (shape.padding, shape.stride, shape.dilation, shape.groups)
    found: torch.Tensor
    if other is None:
        found = _convolution_pointwise.default._op(x, weight, bias, *where, activation, [], "")
    else:
        after: tuple[Any, ...] = ("add", 1.0, None if activation == "none" else activation, [], None)
        kernel, given = (_convolution_into, (other, x)) if into else (_convolution_pointwise.binary._op, (x, other))
        found = kernel(*given, weight, bias, *where, *after)
    return found

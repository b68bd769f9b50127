"""Convolutions with the following batch norm folded into their weights, for graphs without gradients.

Before: ``relu(batch_norm(conv2d(x, w, b), mean, var, gamma, beta))``, three passes over the images.
After: ``convolution_with_norm(x, weight, b, mean, var, gamma, beta, ...)``, one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_graph.passes.backends.cpu.inference.activations import activated, relu_in_place
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.devices import convolution_pointwise, pack_convolution_weight
from amp_graph.passes.torch_compat.storage import all_bytes_of, is_dense_fp32
from amp_graph.passes.weights.frozen_weights import FrozenWeights

own_functions(__name__)


class Shape(NamedTuple):
    """The geometry of a convolution, and what follows its norm; in graphs a plain tuple."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    eps: float
    after: str  # "none", "relu", "silu" or "hardswish"


# oneDNN's names of activations on its fp32 sums. Its relu turns NaN into 0: only for inputs known to be finite.
KERNELS_OWN = {"silu": "swish", "hardswish": "hardswish"}
Vectors = tuple[Tensor | None, ...]  # the convolution's bias; the norm's mean, variance, weight and bias; all fp32


def convolution_with_norm_of(weights: FrozenWeights) -> Callable[..., Tensor]:
    """Return what graphs call: ``convolution_with_norm(x, weight, vectors, where, other, into)``.

    x: low-precision channels_last images [batch, inputs, height, width]; weight: the fp32 parameter; where: the fields
    of ``Shape``; other: images of the result's shape and dtype, added after the norm and before the activation; into:
    whether to write the result over them.

    The norm is folded once, and again when the weight, a vector or eps changes. Statistics are compared by value:
    torch's kernels write them without counting.
    """

    def convolution_with_norm(
        x: Tensor,
        weight: Tensor,
        vectors: Vectors,
        where: tuple[Any, ...],
        other: Tensor | None = None,
        into: bool = False,
    ) -> Tensor:
        shape = Shape(*where)

        def make() -> tuple[Tensor, Tensor, Tensor]:
            folded, bias = fold(weight, vectors, shape, weights.dtype)
            return pack_convolution_weight(folded, shape, x.shape), bias, bias.to(weights.dtype)

        kept: tuple[Tensor, Tensor, Tensor] | None = None
        if all(t is not None and is_dense_fp32(t) for t in vectors[1:3]):
            facts = [all_bytes_of(t) for t in vectors[1:3] if t is not None]
            kind = ("folded", shape.eps, id(vectors[1]))
            kept = weights.form(kind, make, weight, *vectors, facts=facts)
        if kept is None:
            return _as_written(x, weight.to(weights.dtype), vectors, shape, other)
        inside = KERNELS_OWN.get(shape.after, "none") if other is None else "none"
        packed, full, low = kept
        out = convolution_pointwise(x, packed, full if other is None else low, shape, other, into, inside)
        if inside != "none":
            return out
        return relu_in_place(out) if shape.after == "relu" else activated(out, shape.after)

    return convolution_with_norm


def fold(weight: Tensor, vectors: Vectors, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the weight in ``dtype`` and the fp32 bias of the convolution that equals the folded one."""
    bias, mean, var, gamma, beta = vectors
    assert mean is not None, "a norm in evaluation has statistics"
    assert var is not None, "a norm in evaluation has statistics"
    scale = (var.double() + shape.eps).rsqrt()
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if bias is None else (bias - mean) * scale
    shift = shift if beta is None else shift + beta
    return (weight * scale[:, None, None, None]).to(dtype), shift.float()


def _as_written(x: Tensor, low: Tensor, vectors: Vectors, shape: Shape, other: Tensor | None) -> Tensor:
    """Return the same by separate operations."""
    bias, mean, var, gamma, beta = vectors
    bias = None if bias is None else bias.to(low.dtype)
    out = F.conv2d(x, low, bias, shape.stride, shape.padding, shape.dilation, shape.groups)
    out = F.batch_norm(out, mean, var, gamma, beta, False, 0.0, shape.eps)
    out = out if other is None else out.add_(other)
    return activated(out, shape.after)

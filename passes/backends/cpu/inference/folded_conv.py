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
from torch.fx import Node

from amp_graph.passes.backends.cpu.inference.activations import activated, relu_in_place
from amp_graph.passes.registry import own_functions
from amp_graph.passes.torch_compat.onednn import convolution_pointwise, pack_convolution_weight
from amp_graph.passes.torch_compat.storage import all_bytes_of, is_dense_fp32
from amp_graph.passes.weights.cache_entry import is_current
from amp_graph.passes.weights.cast_cache import WeightCopies
from amp_graph.passes.weights.finite_check import is_finite
from amp_graph.passes.weights.packed_copies import FOLDED

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
_CALL = "convolution_with_norm_of.<locals>.convolution_with_norm"
Vectors = tuple[Tensor | None, ...]  # the convolution's bias; the norm's mean, variance, weight and bias; all fp32


class Bias(NamedTuple):
    """What is cached with a folded weight: its bias in fp32 and in low precision, and what both were made from."""

    full: Tensor
    low: Tensor
    elements: list[bytes | float]


def convolution_with_norm_of(copies: WeightCopies) -> Callable[..., Tensor]:
    """Return what graphs call: ``convolution_with_norm(x, weight, vectors, where, other, into, finite)``.

    x: low-precision channels_last images [batch, inputs, height, width]; weight: the fp32 parameter; where: the fields
    of ``Shape``; other: images of the result's shape and dtype, added after the norm and before the activation; into:
    whether to write the result over them; finite: whether ``x`` and ``other`` are finite, if all weights are.

    The norm is folded into a cached copy of the weight, from the first call on: two calls with the same weights have
    the same bits. The copy is made anew when the weight, an element of the vectors, or the norm's eps changes.
    """
    known, weights = copies.packed[FOLDED], copies.finite

    def convolution_with_norm(
        x: Tensor,
        weight: Tensor,
        vectors: Vectors,
        where: tuple[Any, ...],
        other: Tensor | None = None,
        into: bool = False,
        finite: bool = False,
    ) -> Tensor:
        shape = Shape(*where)
        key = (id(weight), id(vectors[1]))
        kept = known.get(key)
        if kept is None or kept.beside.elements != _elements(vectors, shape.eps) or not is_current(kept, weight):
            known.pop(key, None)
            low, plain = copies.for_packing(weight)
            if plain is None or not all(t is None or is_dense_fp32(t) for t in vectors):
                out = _as_written(x, low, vectors, shape, other)
                if finite:
                    weights.note(key, weight, is_finite(out))
                return out
            with torch.inference_mode(False), torch.no_grad():
                folded, bias = fold(weight, vectors, shape, copies.dtype)
                packed = pack_convolution_weight(folded, shape, x.shape)
                beside = Bias(bias, bias.to(copies.dtype), _elements(vectors, shape.eps))
            weights.note(key, weight, is_finite(folded) and is_finite(bias))
            kept = copies.keep_packed(weight, plain, packed, FOLDED, key, beside)
        elif copies.checked:
            copies.check(weight, kept.low.to_dense(), fold(weight, vectors, shape, copies.dtype)[0])
        inside = KERNELS_OWN.get(shape.after, "none") if other is None else "none"
        if shape.after == "relu" and finite and weights.is_all_finite:
            inside = "relu"
        bias = kept.beside.full if other is None else kept.beside.low
        out = convolution_pointwise(x, kept.low, bias, shape, other, into, inside)
        if inside != "none":
            return out
        return relu_in_place(out) if shape.after == "relu" else activated(out, shape.after)

    return convolution_with_norm


def is_folded(node: Node) -> bool:
    """Say whether ``node`` calls a ``convolution_with_norm``."""
    return getattr(node.target, "__qualname__", "").endswith(_CALL)


def _elements(vectors: Vectors, eps: float) -> list[bytes | float]:
    """Return all that a norm is made of, by value: kernels that bypass the version counter write statistics."""
    return [eps, *(b"" if t is None else all_bytes_of(t) for t in vectors)]


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

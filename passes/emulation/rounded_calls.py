"""Calls that compute in fp32 on low-precision operands, and round their results to low precision once.

Before: ``linear(x_fp16, w_fp16)``. After: ``linear(x.float(), w.float()).half()``, whose gradients are sums in fp32 as
well, each rounded to fp16 once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from amp_graph.passes.graph.node_info import HALVES

Dtypes = tuple[torch.dtype | None, ...]  # of the results of a call, in the order of their leaves
BIAS = 2  # the position of a convolution's bias


def is_low(leaf: Any) -> bool:
    """Say whether ``leaf`` is a tensor in low precision."""
    return isinstance(leaf, Tensor) and leaf.dtype in HALVES


def widened(leaf: Any) -> Any:
    """Return a low-precision tensor in fp32; anything else as it is."""
    return leaf.float() if is_low(leaf) else leaf


def _rounded(made: Any, dtypes: Dtypes) -> Any:
    leaves, spec = tree_flatten(made)
    if len(leaves) != len(dtypes):
        return made
    return tree_unflatten([_to(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)], spec)


def _to(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and dtype in HALVES else leaf


@functools.cache
def emulated(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls ``target`` in fp32, and rounds its results to ``dtypes``.

    Operands in fp32 or fp64 alone are computed with as they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(is_low, tree_leaves((args, kwargs)))):
            return target(*args, **kwargs)
        return _rounded(target(*tree_map(widened, args), **tree_map(widened, kwargs)), dtypes)

    return _named(call, target)


@functools.cache
def emulated_convolution(target: Callable[..., Any], dtypes: Dtypes) -> Callable[..., Any]:
    """Return a function that calls a convolution in fp32, rounds, adds the bias, and rounds again, as cuDNN does.

    cuDNN's convolutions have no bias: torch adds it to their result, which is in low precision by then.
    """
    alone = emulated(target, dtypes)

    def call(*args: Any, **kwargs: Any) -> Any:
        bias = args[BIAS] if len(args) > BIAS else kwargs.get("bias")
        if bias is None or not is_low(bias):
            return alone(*args, **kwargs)
        args = (*args[:BIAS], *(None for _ in args[BIAS : BIAS + 1]), *args[BIAS + 1 :])
        made = alone(*args, **{**kwargs, **({"bias": None} if "bias" in kwargs else {})})
        spatial = (args[1] if len(args) > 1 else kwargs["weight"]).dim() - 2
        return made + bias.reshape(-1, *(1,) * spatial)

    return _named(call, target)


def _named(call: Callable[..., Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """Name a function after what it calls, which graphs as text show."""
    name = getattr(target, "__name__", type(target).__name__).replace(".", "_")
    call.__name__ = call.__qualname__ = f"emulated_{name}"
    return call

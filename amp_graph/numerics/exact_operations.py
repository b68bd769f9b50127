"""Runs one operation of a planned graph in float64 on the inputs that it has, to tell its own error from theirs.

Before: ``linear`` in bf16, on inputs that are wrong already. After: ``exact_result(node, inputs)``, what it returns
without any rounding of its own, differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from amp_graph.passes.graph.identify_ops import Identity
from amp_graph.passes.graph.meta_keys import CAST, IDENTITY
from amp_graph.passes.graph.node_info import draws, is_zero


@dataclass(frozen=True)
class Exact:
    """The result (the first of several) of an operation in float64, and its inputs, by the names of their nodes."""

    result: Tensor
    inputs: Mapping[str, Tensor]


def origin(node: Node) -> Node:
    """Return the node whose value an inserted cast casts; the node itself if it is none."""
    source = node.args[0] if CAST in node.meta and node.args else node
    return source if isinstance(source, Node) else node


def exact_result(node: Node, inputs: Mapping[str, Any]) -> Exact | None:
    """Return the result of ``node`` in float64; ``inputs``: the values that it reads, before they are cast.

    None for operations that draw random numbers, that have no kernel for float64, or that return no tensor. The inputs
    are copies: an operation that writes to them changes nothing.
    """
    if _draws(node):
        return None
    copies = {name: tree_map(_copy, value) for name, value in inputs.items()}
    given_to = {name: tree_map(_apart, value) for name, value in copies.items()}
    try:
        args, kwargs = wide_dtypes(
            *(map_arg(given, lambda s: given_to[origin(s).name]) for given in (node.args, node.kwargs))
        )
        with torch.enable_grad():
            if node.op == "call_method":
                name = "double" if node.target == "float" else str(node.target)
                made = getattr(args[0], name)(*args[1:], **kwargs)
            else:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, TypeError, KeyError):  # KeyError: an input that is no value
        return None
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    if not isinstance(first, Tensor) or first.layout != torch.strided or not first.is_floating_point():
        return None
    return Exact(first, {name: t for name, t in copies.items() if isinstance(t, Tensor)})


def _draws(node: Node) -> bool:
    """Say whether ``node`` draws random numbers; a recurrent layer does with dropout only."""
    identity = node.meta.get(IDENTITY)
    operations = identity.operations if isinstance(identity, Identity) else ()
    return any(draws(o.op, dict(o.arguments)) and not is_zero(o.arguments.get("dropout")) for o in operations)


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().to(torch.float64 if leaf.is_floating_point() else leaf.dtype, copy=True)
    return copied.requires_grad_(leaf.requires_grad)


def _apart(leaf: Any) -> Any:
    """Return a tensor that an operation may write to: not a leaf that requires gradients, nor a view of one."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def wide(given: Any) -> Any:
    """Return a float32 tensor in float64."""
    return given.double() if isinstance(given, Tensor) and given.dtype == torch.float32 else given


def wide_dtypes(args: Any, kwargs: Any) -> Any:
    """Return the arguments of a call with float64 in the place of float32."""
    return tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs))

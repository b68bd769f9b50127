"""Which readers of a value would save it for backward.

Before: ``h = relu(z); y = conv2d(h, w); s = h + x``.
After: ``readers_of(h)``: the convolution saves it, the sum does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from amp_graph.passes.casts.share_casts import shared_cast
from amp_graph.passes.graph.fake_values import value
from amp_graph.passes.graph.identify_ops import is_part, names_of, only_views
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, REGION
from amp_graph.passes.registry import traits_of
from amp_graph.passes.torch_compat.fake import concrete_size, numel

PRODUCTS = frozenset({"aten.linear", "aten.addmm", "aten.matmul", "aten.mm"})
CONVOLUTIONS = frozenset(f"aten.conv{d}d" for d in (1, 2, 3))
TRANSPOSED = frozenset(f"aten.conv_transpose{d}d" for d in (1, 2, 3))
POOLS = frozenset(f"aten.{kind}_pool2d" for kind in ("max", "avg", "adaptive_avg"))
READERS = PRODUCTS | CONVOLUTIONS | TRANSPOSED | POOLS
SAVES_NOTHING = frozenset(f"aten.{name}" for name in ("add", "add_", "sub", "cat", "stack", "mean", "sum"))
CASTS = frozenset({"aten.to", "aten._to_copy"})


@dataclass(frozen=True)
class Readers:
    """The readers that save a value, or a view or low-precision copy of it, and need not.

    products: multiplications that they make for each element of the value. reason: why some other reader must save it.
    """

    readers: tuple[Node, ...] = ()
    products: float = 0.0
    reason: str = ""


def readers_of(node: Node) -> Readers:
    """Find the readers that save the value of a node."""
    readers: list[Node] = []
    reasons: list[str] = []
    stack = [(node, True)]
    while stack:
        source, whole = stack.pop()
        for user in source.users:
            if _passes_on(user, whole):
                stack.append((user, whole and user.target is shared_cast))
            elif _could_do_without(user):
                readers.append(user)
            elif reason := _why_kept(source, user):
                reasons.append(reason)
    found = tuple(dict.fromkeys(readers))
    products = sum(_products(r) for r in found) / max(1, numel(value(node)))
    return Readers(found, products, reasons[0] if reasons else "")


def _passes_on(user: Node, whole: bool) -> bool:
    return not _is_apart(user) and (is_part(user) or only_views(user) or (whole and _is_low_copy(user)))


def _could_do_without(user: Node) -> bool:
    names = names_of(user)
    return not _is_apart(user) and user.op == "call_function" and len(names) == 1 and names[0] in READERS


def _why_kept(node: Node, user: Node) -> str:
    if user.op == "output":
        return "it is returned"
    if _is_apart(user):
        return f"{user.name} is in a checkpoint or in the user's own autocast"
    saves = traits_of(user.target).saves
    if saves is not None and not saves(user, node):
        return ""
    return "" if names_of(user) and SAVES_NOTHING.issuperset(names_of(user)) else f"{user.name} saves it"


def _is_apart(user: Node) -> bool:
    return CHECKPOINT in user.meta or REGION in user.meta


def _is_low_copy(user: Node) -> bool:
    """Say whether ``user`` rounds the value that it reads, which can be repeated if it is a whole one."""
    if user.target is shared_cast:
        return True
    names, made = names_of(user), value(user)
    cast = CAST in user.meta if not names else CASTS.issuperset(names)
    source = value(user.all_input_nodes[0]) if user.all_input_nodes else None
    if not cast or not isinstance(made, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return made.dtype.itemsize == 2 and source.dtype == torch.float32


def _products(reader: Any) -> float:
    """Return how many multiplications a matmul makes in forward; infinity for a pool, whose kernel is slower."""
    names, x = names_of(reader)[0], value(reader.all_input_nodes[0])
    if names in POOLS:
        return math.inf
    weights = [v for v in map(value, reader.all_input_nodes) if isinstance(v, torch.Tensor) and v.dim() > 1][1:]
    if not weights:
        return 0.0
    out, weight = value(reader), weights[0]
    if names in TRANSPOSED:
        return numel(x) * numel(weight) / concrete_size(weight.shape[0])
    if names in CONVOLUTIONS:
        return numel(out) * numel(weight) / concrete_size(weight.shape[0])
    wide = value(reader.args[1]) if names == "aten.addmm" else x
    return numel(out) * concrete_size(wide.shape[-1])

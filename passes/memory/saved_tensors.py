"""Which readers of a value would save it for backward, and how much memory a graph needs for its values.

Before: ``h = relu(z); y = conv2d(h, w); s = h + x``.
After: ``readers_of(h)``: the convolution saves it, the sum does not; ``most_bytes(gm)``, the peak of what is alive at
the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.casts.share_casts import shared_cast
from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.graph.identify_ops import is_part, names_of, only_views
from amp_graph.passes.graph.meta_keys import CAST, CHECKPOINT, REGION
from amp_graph.passes.registry import traits_of
from amp_graph.passes.torch_compat.fake import concrete_size, numel
from amp_graph.passes.torch_compat.storage import bytes_of, storage_key

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


def readers_of(*aliases: Node) -> Readers:
    """Find the readers that save the value of a node, or of several nodes that share its memory."""
    readers: list[Node] = []
    reasons: list[str] = []
    stack = [(alias, True) for alias in aliases]
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
    products = sum(_products(r) for r in found) / max(1, numel(value(aliases[0])))
    return Readers(found, products, reasons[0] if reasons else "")


def _passes_on(user: Node, whole: bool) -> bool:
    return not _is_apart(user) and (_is_view(user) or _is_low_copy(user, whole))


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


def _is_view(user: Node) -> bool:
    """Say whether ``user`` only makes a view of existing memory."""
    return is_part(user) or only_views(user)


def _is_low_copy(user: Node, whole: bool) -> bool:
    """Say whether ``user`` rounds a whole value, which can be repeated."""
    if not whole:
        return False
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


def most_bytes(gm: GraphModule) -> int:
    """Return the peak number of bytes alive at the same time among what ``gm`` makes.

    Its inputs do not count, nor views of them, nor values without storage (sparse, wrapped tensors).
    """
    given: set[int | None] = {None}
    sizes: dict[int | None, int] = {}
    first: dict[int | None, int] = {}  # the position in the graph where a storage is made
    last: dict[int | None, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        own = tensors(value(node))
        if node.op in ("placeholder", "get_attr"):
            given |= {storage_key(t) for t in own}
            continue
        for t in own:
            if (key := storage_key(t)) not in given:
                sizes.setdefault(key, concrete_size(bytes_of(t)))
                first.setdefault(key, place)
        read = (t for source in node.all_input_nodes for t in tensors(value(source)))
        last |= {key: place for t in (*own, *read) if (key := storage_key(t)) in sizes}
    added = Counter[int]()  # change at each position
    for key, size in sizes.items():
        added[first[key]] += size
        added[last[key] + 1] -= size
    return max(accumulate(added[place] for place in sorted(added)), default=0)

"""Plan which low-precision copies of weights may stay in memory without adding to the peak of a step.

Before: a graph in training, as it will run. After: ``plan_of(gm)``, from the bytes that are alive at each point of its
backward: saved activations, copies still to be read, gradients that have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import captured, tensors, value
from amp_graph.passes.graph.grad_regions import is_trained
from amp_graph.passes.graph.identify_ops import names_of
from amp_graph.passes.memory.saved_tensors import CONVOLUTIONS, PRODUCTS
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import bytes_of, storage_key
from amp_graph.passes.weights.cache_entry import LARGE
from amp_graph.passes.weights.cache_weight_casts import is_kept
from amp_graph.passes.weights.copy_lifetimes import CopyPlan

# Operations that save their inputs, or as much: only these are counted, so that what backward frees is a lower bound.
SAVES_INPUTS = PRODUCTS | CONVOLUTIONS | {"aten.scaled_dot_product_attention", "aten.cross_entropy_loss"}


@dataclass
class _Point:
    """What changes in backward at one node of the forward, in bytes.

    freed: activations. arrived: gradients that are new memory. passing: what exists while they are made. copies: those
    that no backward reads after this one. unread: those that no backward reads at all. Both by number of the input.
    """

    node: Node
    freed: int = 0
    arrived: int = 0
    passing: int = 0
    copies: dict[int, int] = field(default_factory=dict)
    unread: dict[int, int] = field(default_factory=dict)


def plan_of(gm: GraphModule) -> CopyPlan:
    """Return the plan of a graph whose copies are all cached."""
    points = list(_backward(gm))
    fresh, adding = _staying(points, True), _staying(points, False)
    sizes = {i: size for point in points for i, size in (*point.copies.items(), *point.unread.items())}
    return CopyPlan(
        frozenset(fresh),
        frozenset(adding),
        sum(sizes.values()),
        sum(sizes[i] for i in fresh),
        sum(p.arrived for p in points),
        sum(p.freed for p in points),
    )


def _staying(points: list[_Point], fresh: bool) -> set[int]:
    """Return the copies that may stay: with them no point of backward needs more than the peak without them.

    A copy that is not freed counts from its own point on, and one that no backward reads from the start on. Those that
    nothing reads any more at the peak cannot stay; of the others, first those that are read last.
    """
    alive, levels = 0, [0]  # against the start of backward, where all copies are alive that it reads
    for point in points:
        alive -= point.freed + sum(point.copies.values())
        levels.append(alive + point.arrived + point.passing)
        alive += point.arrived if fresh else 0
    most = max(levels)
    staying: set[int] = set()
    room = [most - level for level in levels]  # at the start of backward, and at each point
    for place, point in reversed(list(enumerate(points, 1))):
        for copies, start in ((point.copies, place), (point.unread, 0)):
            for i, size in copies.items():
                if size <= min(room[start:]):
                    staying.add(i)
                    room[start:] = [r - size for r in room[start:]]
    return staying


def _backward(gm: GraphModule) -> Iterator[_Point]:
    """Yield the points of backward, in its order: that of the forward reversed."""
    inputs = {node: i for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    points = {node: _Point(node, size) for node, size in _saved(gm).items()}
    has_arrived: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        for source in node.all_input_nodes if is_trained(node) else ():
            weight = captured(source)
            if source not in inputs or not isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
                continue
            size, point = _bytes(weight), points.setdefault(node, _Point(node))
            if is_kept(node) and size >= 4 * LARGE:  # smaller copies always stay
                _add_copy(points, node, inputs[source], size // 2)
            if source in has_arrived:
                point.passing += size
            else:
                has_arrived.add(source)
                point.arrived += size
    yield from (points[node] for node in reversed(gm.graph.nodes) if node in points)


def _add_copy(points: dict[Node, _Point], copy: Node, number: int, size: int) -> None:
    """Add where the backward ends with a copy, and where its gradient, of as many bytes, is made, summed and cast."""
    own = points[copy]
    own.passing += size
    readers = [points.setdefault(node, _Point(node)) for node in copy.graph.nodes if node in copy.users]
    for point in readers[:-1]:
        point.passing += 2 * size  # the next term of the sum, and the new sum
    for point in readers[-1:]:
        point.freed -= size
        own.freed += size
    last = next((point for point in readers if _is_saved(copy, point.node)), None)
    (own.unread if last is None else last.copies)[number] = size


def _is_saved(copy: Node, reader: Node) -> bool:
    """Say whether the backward of ``reader`` reads ``copy``; not if it is a product with what needs no gradient."""
    if (PRODUCTS | CONVOLUTIONS).isdisjoint(names_of(reader)):
        return True
    others = [node for node in reader.all_input_nodes if not is_kept(node)]
    return any(t.requires_grad for node in others for t in tensors(captured(node)))


def saved_bytes(gm: GraphModule, copies: Collection[Node]) -> int:
    """Return the bytes of activations that backward frees, a lower bound; ``copies`` of weights are none."""
    return sum(_saved(gm, copies).values())


def _saved(gm: GraphModule, copies: Collection[Node] = ()) -> dict[Node, int]:
    """Return the bytes of activations whose first reader that saves them is a node, whose backward frees them."""
    found: dict[Node, int] = defaultdict(int)
    seen: set[int | None] = {None}
    for node in gm.graph.nodes:
        if node.op == "placeholder" or is_kept(node) or node in copies:
            seen |= {storage_key(t) for t in tensors(value(node))}
        elif is_trained(node) and not SAVES_INPUTS.isdisjoint(names_of(node)):
            for t in (t for source in node.all_input_nodes for t in tensors(value(source))):
                if (key := storage_key(t)) not in seen:
                    seen.add(key)
                    found[node] += _bytes(t)
    return found


def _bytes(t: torch.Tensor) -> int:
    return int(concrete_size(bytes_of(t)))

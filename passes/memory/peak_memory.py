"""How much memory a graph needs for its values, computed from their storages.

Before: a graph of any operators, captured or traced.
After: ``most_bytes(gm)``, the peak of what is alive at the same time; ``bytes_made(gm)``, the total, as backward may
need each value. Data-dependent sizes are those of the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import GraphModule, Node

from amp_graph.passes.graph.fake_values import tensors, value
from amp_graph.passes.torch_compat.fake import concrete_size
from amp_graph.passes.torch_compat.storage import bytes_of, storage_key


@dataclass
class _Storage:
    size: int
    made: int  # position in the graph where it is made
    read: int  # position of its last use


def most_bytes(gm: GraphModule, but: Callable[[Node], bool] = lambda node: False) -> int:
    """Return the peak number of bytes alive at the same time among what ``gm`` makes, ``but`` some results."""
    added: dict[int, int] = {}  # change at each position
    for one in _storages(gm, but):
        added[one.made] = added.get(one.made, 0) + one.size
        added[one.read + 1] = added.get(one.read + 1, 0) - one.size
    return max(accumulate(added[place] for place in sorted(added)), default=0)


def bytes_made(gm: GraphModule) -> int:
    """Return how many bytes ``gm`` makes in total."""
    return sum(one.size for one in _storages(gm, lambda node: False))


def _storages(gm: GraphModule, but: Callable[[Node], bool]) -> list[_Storage]:
    """Return what ``gm`` makes: not its inputs, views of them, or values without storage (sparse, wrapped tensors)."""
    given: set[int | None] = {None}
    made: dict[int | None, _Storage] = {}
    for place, node in enumerate(gm.graph.nodes):
        own = tensors(value(node))
        if node.op in ("placeholder", "get_attr") or but(node):
            given |= {storage_key(t) for t in own}
            continue
        for t in own:
            if (key := storage_key(t)) not in given:
                made.setdefault(key, _Storage(concrete_size(bytes_of(t)), place, place))
        for t in (*own, *(t for source in node.all_input_nodes for t in tensors(value(source)))):
            if (found := made.get(storage_key(t))) is not None:
                found.read = place
    return list(made.values())

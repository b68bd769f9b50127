"""Which values share storage, and where that storage is written: asked of the captured fake tensors.

Before: ``v = h[:, 0]; v += 1``. After: ``h`` and ``v`` are one storage, written once; a cast of ``h`` made
before the write may not serve a reader after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch.fx import GraphModule, Node

from amp_graph.passes.node_value import captured, tensors
from amp_graph.passes.torch_private import storage_key


class Writes(Protocol):
    """What knows which of a node's inputs the node writes to (a classification, a mark)."""

    @property
    def written(self) -> frozenset[Node]:
        """The inputs that are written."""
        ...


@dataclass(frozen=True)
class Memory:
    """The written storages of a graph.

    ``writers`` maps a storage to the positions in the graph (node order) at which it is written.
    """

    storages: Mapping[Node, frozenset[int]]
    writers: Mapping[int, tuple[int, ...]]
    order: Mapping[Node, int]

    def is_written(self, node: Node) -> bool:
        """Say whether the storage of the value of ``node`` is written anywhere in the graph."""
        return any(key in self.writers for key in self.storages.get(node, ()))

    def is_written_after(self, node: Node) -> bool:
        """Say whether the storage of the value of ``node`` is written behind ``node``."""
        return bool(self.written_after(node))

    def written_after(self, node: Node) -> frozenset[int]:
        """Return those storages of the value of ``node`` that are written behind it."""
        at = self.order[node]
        keys = self.storages.get(node, frozenset())
        return frozenset(key for key in keys if any(place > at for place in self.writers.get(key, ())))

    def epoch(self, node: Node, reader: Node) -> int:
        """Return how often the storage of ``node`` has been written before ``reader`` runs."""
        at = self.order[reader]
        return sum(sum(1 for place in self.writers.get(key, ()) if place < at) for key in self.storages.get(node, ()))


def observe(gm: GraphModule, writes: Mapping[Node, Writes]) -> Memory:
    """Read aliasing from the captured values' storages, and writes from the operations' schemas."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    storages = {node: _keys(node) for node in order}
    writers: dict[int, list[int]] = {}
    for node, found in writes.items():
        for target in found.written:
            for key in storages.get(target, ()):
                writers.setdefault(key, []).append(order[node])
    return Memory(storages, {k: tuple(v) for k, v in writers.items()}, order)


def _keys(node: Node) -> frozenset[int]:
    keys = (storage_key(t) for t in tensors(captured(node)))
    return frozenset(key for key in keys if key is not None)

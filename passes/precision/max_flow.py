"""A minimum cut of a small-integer network, by Dinic's algorithm: edges in, the sink's side out.

Before: what each node gains on one side, and what parting two nodes costs. After: the nodes on the sink's side.
networkx has it too, and takes several times as long (``benchmarks/plan_time.py``).
Source: E. A. Dinic, Soviet Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCE, SINK = 0, 1


class Network:
    """A flow network over nodes 2, 3, ..., beside ``SOURCE`` and ``SINK``; edges are numbered in pairs.

    Edge ``2k`` is one that was given, and edge ``2k + 1`` its reverse; ``room`` is what still fits through each.
    """

    def __init__(self, count: int) -> None:
        self.leaving: list[list[int]] = [[] for _ in range(count)]
        self.target: list[int] = []
        self.room: list[int] = []
        self.level: list[int] = []

    def connect(self, a: int, b: int, capacity: int) -> None:
        """Add an edge."""
        for source, target, room in ((a, b, capacity), (b, a, 0)):
            self.leaving[source].append(len(self.target))
            self.target.append(target)
            self.room.append(room)

    def saturate(self) -> None:
        """Send as much from the source to the sink as fits."""
        while self._reach():
            following = [iter(edges) for edges in self.leaving]
            path: list[int] = []
            while self._advance(path, following):
                self._send(path)

    def _reach(self) -> bool:
        """Give every node its distance from the source; say whether the sink is within reach."""
        level = self.level = [-1] * len(self.leaving)
        level[SOURCE] = 0
        ring = [SOURCE]
        while ring and level[SINK] < 0:
            further = []
            for node in ring:
                for edge in self.leaving[node]:
                    target = self.target[edge]
                    if self.room[edge] and level[target] < 0:
                        level[target] = level[node] + 1
                        further.append(target)
            ring = further
        return level[SINK] >= 0

    def _advance(self, path: list[int], following: list) -> bool:
        """Extend ``path`` to the sink along growing distances; an edge that leads nowhere is not tried again."""
        node = self.target[path[-1]] if path else SOURCE
        level, target, room = self.level, self.target, self.room
        while node != SINK:
            wanted = level[node] + 1
            for edge in following[node]:
                if room[edge] and level[target[edge]] == wanted:
                    path.append(edge)
                    node = target[edge]
                    break
            else:
                if not path:
                    return False
                path.pop()
                node = target[path[-1]] if path else SOURCE
        return True

    def _send(self, path: list[int]) -> None:
        """Fill ``path``, and cut it back to before its first full edge."""
        amount = min(self.room[edge] for edge in path)
        full = None
        for position, edge in enumerate(path):
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
            if full is None and not self.room[edge]:
                full = position
        del path[full:]

    def sink_side(self) -> set[int]:
        """Return the nodes from which the sink is still within reach."""
        found, queue = {SINK}, [SINK]
        while queue:
            for edge in self.leaving[queue.pop()]:
                source = self.target[edge]
                if self.room[edge ^ 1] and source not in found:
                    found.add(source)
                    queue.append(source)
        return found


def sink_side(gains: Mapping[int, int], edges: Mapping[tuple[int, int], int | None]) -> set[int]:
    """Return the smallest sink's side of a minimum cut.

    ``gains[n]``: what node ``n`` costs on the sink's side more than on the source's. ``edges[a, b]``: what it costs
    that ``a`` is on the source's side and ``b`` on the sink's; None: it may not be.
    """
    nodes = list(dict.fromkeys([*gains, *(n for pair in edges for n in pair)]))
    number = {node: position for position, node in enumerate(nodes, 2)}
    network = Network(len(nodes) + 2)
    unbounded = sum(gain for gain in gains.values() if gain > 0) + 1
    for node, gain in gains.items():
        if gain > 0:
            network.connect(SOURCE, number[node], gain)
        elif gain < 0:
            network.connect(number[node], SINK, -gain)
    for (a, b), capacity in edges.items():
        network.connect(number[a], number[b], unbounded if capacity is None else capacity)
    network.saturate()
    return {nodes[n - 2] for n in network.sink_side() if n > SINK}

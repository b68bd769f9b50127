"""Minimum cut of a network with integer capacities, by Dinic's algorithm.

Before: the gain of each node on one side, and the cost of separating two nodes. After: the nodes on the sink's side.
networkx's implementation takes several times as long (``benchmarks/plan_time.py``).
Source: E. A. Dinic, Soviet Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCE, SINK = 0, 1


class Network:
    """A flow network over ``SOURCE``, ``SINK`` and nodes 2, 3, ...; edges are numbered in pairs.

    Edge ``2k`` is one that was added, edge ``2k + 1`` its reverse. ``room`` holds the residual capacity of each.
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
        """Send the maximum flow from the source to the sink."""
        while self._reach():
            following = [iter(edges) for edges in self.leaving]
            path: list[int] = []
            while self._advance(path, following):
                self._send(path)

    def _reach(self) -> bool:
        """Compute the distance of every node from the source; say whether the sink is reachable."""
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
        """Extend ``path`` to the sink along growing distances; never try a dead-end edge twice."""
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
        """Saturate ``path``, and truncate it before its first saturated edge."""
        amount = min(self.room[edge] for edge in path)
        full = None
        for position, edge in enumerate(path):
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
            if full is None and not self.room[edge]:
                full = position
        del path[full:]

    def sink_side(self) -> set[int]:
        """Return the nodes from which the sink is still reachable."""
        found, queue = {SINK}, [SINK]
        while queue:
            for edge in self.leaving[queue.pop()]:
                source = self.target[edge]
                if self.room[edge ^ 1] and source not in found:
                    found.add(source)
                    queue.append(source)
        return found


def sink_side(gains: Mapping[int, int], edges: Mapping[tuple[int, int], int | None]) -> set[int]:
    """Return the smallest sink side of a minimum cut.

    ``gains[n]``: the extra cost of node ``n`` on the sink's side over the source's side. ``edges[a, b]``: the cost if
    ``a`` is on the source's side and ``b`` on the sink's side; None: that is forbidden.
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

"""Minimum cut of a network with integer capacities, by Dinic's algorithm.

Before: the gain of each node on one side, and the cost of separating two nodes. After: the nodes on the sink's side.
networkx has the same, but importing it takes longer than planning a model.
Source: E. A. Dinic, Soviet Mathematics Doklady 11, 1970.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

SOURCE, SINK = -1, -2
Room = Mapping[int, dict[int, int]]  # the residual capacity of each edge, by its two ends


def sink_side(gains: Mapping[int, int], edges: Mapping[tuple[int, int], int | None]) -> set[int]:
    """Return the smallest sink side of a minimum cut.

    ``gains[n]``: the extra cost of node ``n`` on the sink's side over the source's side. ``edges[a, b]``: the cost if
    ``a`` is on the source's side and ``b`` on the sink's side; None: that is forbidden.
    """
    room: Room = defaultdict(dict)

    def connect(a: int, b: int, capacity: int) -> None:
        room[a][b] = room[a].get(b, 0) + capacity
        room[b].setdefault(a, 0)

    unbounded = sum(gain for gain in gains.values() if gain > 0) + 1
    for node, gain in gains.items():
        connect(*((SOURCE, node) if gain > 0 else (node, SINK)), abs(gain))
    for (a, b), capacity in edges.items():
        connect(a, b, unbounded if capacity is None else capacity)
    _saturate(room)
    found, queue = {SINK}, [SINK]
    for node in queue:
        before = [other for other in room[node] if room[other][node] and other not in found]
        found.update(before)
        queue.extend(before)
    return found - {SINK}


def _saturate(room: Room) -> None:
    """Send the maximum flow from the source to the sink."""
    while SINK in (level := _levels(room)):
        untried = {node: list(ends) for node, ends in room.items()}
        while path := _path(room, level, untried):
            amount = min(room[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                room[a][b] -= amount
                room[b][a] += amount


def _levels(room: Room) -> dict[int, int]:
    """Return the distance from the source of each node that it reaches."""
    level, queue = {SOURCE: 0}, [SOURCE]
    for node in queue:
        for end, left in room[node].items():
            if left and end not in level:
                level[end] = level[node] + 1
                queue.append(end)
    return level


def _path(room: Room, level: Mapping[int, int], untried: Mapping[int, list[int]]) -> list[int]:
    """Return a path to the sink along growing distances, [] if none is left; never try a dead end twice."""
    path = [SOURCE]
    while path[-1] != SINK:
        node = path[-1]
        ends = untried[node]
        while ends and not (room[node][ends[-1]] and level.get(ends[-1]) == level[node] + 1):
            ends.pop()
        if ends:
            path.append(ends[-1])
        elif node == SOURCE:
            return []
        else:
            path.pop()
            untried[path[-1]].pop()
    return path

"""Find the cheapest assignment of two precisions, by a minimum cut; works on numbers, without any torch graph.

Before: operations with a cost in each precision, and casts with a cost. After: the operations that are low.
The cut is found by Dinic's algorithm (E. A. Dinic, Soviet Mathematics Doklady 11, 1970). networkx has the same, but
importing it takes longer than planning a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from itertools import pairwise

FULL_ALWAYS, LOW_ALWAYS = 0, 1  # the first two variables of every task stand for the two precisions themselves
Room = Mapping[int, dict[int, int]]  # the residual capacity of each edge, by its two ends


def full_side(edges: Mapping[tuple[int, int], int]) -> set[int]:
    """Return the smallest side of ``FULL_ALWAYS`` of a minimum cut between it and ``LOW_ALWAYS``.

    ``edges[a, b]``: the cost if ``a`` is on the side of ``LOW_ALWAYS`` and ``b`` on that of ``FULL_ALWAYS``.
    """
    room: Room = defaultdict(dict)
    for (a, b), capacity in edges.items():
        room[a][b] = room[a].get(b, 0) + capacity
        room[b].setdefault(a, 0)
    _saturate(room)
    return set(_distances(FULL_ALWAYS, lambda node: [other for other in room[node] if room[other][node]]))


def _saturate(room: Room) -> None:
    """Send the maximum flow from ``LOW_ALWAYS`` to ``FULL_ALWAYS``."""
    while FULL_ALWAYS in (level := _distances(LOW_ALWAYS, lambda node: [e for e, left in room[node].items() if left])):
        untried = {node: list(ends) for node, ends in room.items()}
        while path := _path(room, level, untried):
            amount = min(room[a][b] for a, b in pairwise(path))
            for a, b in pairwise(path):
                room[a][b] -= amount
                room[b][a] += amount


def _distances(start: int, beside: Callable[[int], list[int]]) -> dict[int, int]:
    """Return the distance of each node that ``start`` reaches by steps to those ``beside`` a node."""
    found, queue = {start: 0}, [start]
    for node in queue:
        for end in beside(node):
            if end not in found:
                found[end] = found[node] + 1
                queue.append(end)
    return found


def _path(room: Room, level: Mapping[int, int], untried: Mapping[int, list[int]]) -> list[int]:
    """Return a path to ``FULL_ALWAYS`` along growing distances, [] if none is left; never try a dead end twice."""
    path = [LOW_ALWAYS]
    while path[-1] != FULL_ALWAYS:
        node = path[-1]
        ends = untried[node]
        while ends and not (room[node][ends[-1]] and level.get(ends[-1]) == level[node] + 1):
            ends.pop()
        if ends:
            path.append(ends[-1])
        elif node == LOW_ALWAYS:
            return []
        else:
            path.pop()
            untried[path[-1]].pop()
    return path


@dataclass(frozen=True)
class Term:
    """A cost that arises once, if any variable of ``lows`` is low and any of ``fulls`` is full.

    A downcast: low readers of a full value; an upcast: full readers of a low value; each counts once for any number of
    readers. A promotion: a full reader that widens a low operand itself. A value that is saved for backward: in low
    precision for low readers (beside ``FULL_ALWAYS``), in full precision for full ones (beside ``LOW_ALWAYS``).
    """

    lows: tuple[int, ...]
    fulls: tuple[int, ...]
    price: int

    def is_due(self, low: Container[int]) -> bool:
        """Say whether the cost arises where the variables in ``low`` are low."""
        return any(i in low for i in self.lows) and any(i not in low for i in self.fulls)


@dataclass(frozen=True)
class Task:
    """Variables that are full or low, and the costs of both, in integer picoseconds.

    ``full[i]`` and ``low[i]``: the cost of variable ``i`` alone. ``fixed``: variables with a fixed value (True: low).
    ``limits``: pairs (a, b): ``a`` may be low only if ``b`` is low. ``terms``: costs of several variables together.
    """

    full: tuple[int, ...]
    low: tuple[int, ...]
    fixed: Mapping[int, bool]
    limits: tuple[tuple[int, int], ...] = ()
    terms: tuple[Term, ...] = ()


def cost(task: Task, low: Collection[int]) -> int:
    """Return the cost of the assignment in which the variables in ``low`` are low; ignores the limits."""
    low = frozenset(low)
    alone = sum(task.low[i] if i in low else task.full[i] for i in range(len(task.full)))
    return alone + sum(term.price for term in task.terms if term.is_due(low))


def is_legal(task: Task, low: Collection[int]) -> bool:
    """Say whether an assignment respects the fixed variables and the limits."""
    return all((i in low) == is_low for i, is_low in task.fixed.items()) and all(
        a not in low or b in low for a, b in task.limits
    )


def most(task: Task) -> int:
    """Return an upper bound on the cost of any assignment."""
    return sum(map(max, task.full, task.low)) + sum(term.price for term in task.terms)


def cheapest(task: Task) -> frozenset[int]:
    """Return the low variables of a legal assignment of least cost; among several, the largest set.

    There are two precisions, and each cost arises where two variables differ, so this is a minimum cut. Raises
    ValueError if no assignment is legal.
    """
    network = _Network(task)
    full = full_side(network.edges)
    found = frozenset(i for i in range(len(task.full)) if network.place.get(i, i) not in full)
    if not is_legal(task, found):
        raise ValueError("the fixed values of variables break a limit between them")
    return found


class _Network:
    """The flow network of a task: fixed variables are the one of their precision, and what is forbidden costs most."""

    def __init__(self, task: Task) -> None:
        self.place = {i: LOW_ALWAYS if is_low else FULL_ALWAYS for i, is_low in task.fixed.items()}
        self.spare = len(task.full)  # the number of the next auxiliary node
        self.edges: Counter[tuple[int, int]] = Counter()
        never = 1 + most(task)
        for i, (full, low) in enumerate(zip(task.full, task.low, strict=True)):
            self._part(LOW_ALWAYS, i, full - low)
            self._part(i, FULL_ALWAYS, low - full)
        for a, b in task.limits:
            self._part(a, b, never)
        for term in (t for t in task.terms if t.price):
            lows, fulls = self._side(term.lows, LOW_ALWAYS), self._side(term.fulls, FULL_ALWAYS)
            a, b = self._one_for(lows), self._one_for(fulls)
            for i in lows:
                self._part(i, a, never)
            for i in fulls:
                self._part(b, i, never)
            self._part(a, b, term.price)

    def _part(self, a: int, b: int, price: int) -> None:
        """Add the cost ``price`` if ``a`` is low and ``b`` is full."""
        a, b = self.place.get(a, a), self.place.get(b, b)
        if price > 0 and a != b and a != FULL_ALWAYS and b != LOW_ALWAYS:
            self.edges[a, b] += price

    def _side(self, variables: tuple[int, ...], enough: int) -> list[int]:
        """Return the variables of a side of a term; ``enough`` alone if it is there."""
        found = {self.place.get(i, i) for i in variables}
        return [enough] if enough in found else sorted(found)

    def _one_for(self, side: list[int]) -> int:
        """Return the node for a side of a term: an auxiliary one for several variables, whose cost counts once."""
        if len(side) == 1:
            return side[0]
        self.spare += 1
        return self.spare - 1

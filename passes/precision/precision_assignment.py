"""Find the cheapest assignment of two precisions, by a minimum cut; works on numbers, without any torch graph.

Before: operations with a cost in each precision, and casts with a cost. After: the operations that are low.
The cut is found by Dinic's algorithm (E. A. Dinic, Soviet Mathematics Doklady 11, 1970). networkx has the same, but
importing it takes longer than planning a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
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


FULL_ALWAYS, LOW_ALWAYS = 0, 1  # the first two variables of every task stand for the two precisions themselves


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


def cheapest(task: Task) -> frozenset[int]:
    """Return the low variables of a legal assignment of least cost; among several, the largest set.

    There are two precisions, and each cost arises where two variables differ, so this is a minimum cut: low is the
    source's side. An auxiliary node between a value and its readers makes a cast count once. Raises ValueError if no
    assignment is legal.
    """
    decided = _decided(task)
    gains, edges = _CutNetwork(task, decided).drawn()
    full = sink_side(gains, edges)
    return frozenset(i for i in range(len(task.full)) if decided.get(i, i not in full))


def _decided(task: Task) -> dict[int, bool]:
    """Return the fixed variables, and those that the limits fix as a consequence."""
    decided = {**task.fixed, FULL_ALWAYS: False, LOW_ALWAYS: True}
    lower: dict[int, list[int]] = {}  # if the key is full, these are full
    raise_: dict[int, list[int]] = {}  # if the key is low, these are low
    for a, b in task.limits:
        lower.setdefault(b, []).append(a)
        raise_.setdefault(a, []).append(b)
    queue = list(decided)
    while queue:
        i = queue.pop()
        for j in (raise_ if decided[i] else lower).get(i, ()):
            if j not in decided:
                decided[j] = decided[i]
                queue.append(j)
            elif decided[j] != decided[i]:
                raise ValueError(f"the fixed values of variables {i} and {j} break a limit between them")
    return decided


class _CutNetwork:
    """The flow network of a task; every decided variable is replaced by the variable of its precision."""

    def __init__(self, task: Task, decided: Mapping[int, bool]) -> None:
        self.task = task
        self.place = {i: LOW_ALWAYS if is_low else FULL_ALWAYS for i, is_low in decided.items()}
        self.spare = len(task.full)  # the number of the next auxiliary node
        self.gains: dict[int, int] = {}
        self.edges: dict[tuple[int, int], int | None] = {}

    def drawn(self) -> tuple[dict[int, int], dict[tuple[int, int], int | None]]:
        """Return the gain of each node from being low, and the cost of separating two nodes."""
        task = self.task
        for i, (full, low) in enumerate(zip(task.full, task.low, strict=True)):
            self._part(LOW_ALWAYS, i, full - low)
        for a, b in task.limits:
            self._part(a, b, None)
        for term in task.terms:
            self._draw(term)
        return self.gains, self.edges

    def _part(self, a: int, b: int, price: int | None) -> None:
        """Add the cost ``price`` if ``a`` is low and ``b`` is full; None forbids it."""
        a, b = self.place.get(a, a), self.place.get(b, b)
        if price == 0 or a == b or a == FULL_ALWAYS or b == LOW_ALWAYS or (a, b) == (LOW_ALWAYS, FULL_ALWAYS):
            return
        if price is not None and a == LOW_ALWAYS:
            self.gains[b] = self.gains.get(b, 0) + price
        elif price is not None and b == FULL_ALWAYS:
            self.gains[a] = self.gains.get(a, 0) - price
        elif price is None or self.edges.get((a, b), 0) is None:
            self.edges[a, b] = None  # a limit with a decided variable has already been applied
        else:
            self.edges[a, b] = (self.edges.get((a, b)) or 0) + price

    def _draw(self, term: Term) -> None:
        """Add the cost of ``term``; an auxiliary node stands for several variables of one side."""
        lows = self._side(term.lows, LOW_ALWAYS, FULL_ALWAYS)
        fulls = self._side(term.fulls, FULL_ALWAYS, LOW_ALWAYS)
        if not lows or not fulls or not term.price:
            return
        a, b = (self._one_for(side) for side in (lows, fulls))
        for i in lows:
            self._part(i, a, None)
        for i in fulls:
            self._part(b, i, None)
        self._part(a, b, term.price)

    def _side(self, variables: tuple[int, ...], enough: int, never: int) -> list[int]:
        """Return the variables that decide a side of a term: ``enough`` alone if it is there, ``never`` not at all."""
        found = {self.place.get(i, i) for i in variables} - {never}
        return [enough] if enough in found else sorted(found)

    def _one_for(self, side: list[int]) -> int:
        if len(side) == 1:
            return side[0]
        self.spare += 1
        return self.spare - 1

"""Find the cheapest assignment of two precisions, by a minimum cut; works on numbers, without any torch graph.

Before: operations with a cost in each precision, and casts with a cost. After: the operations that are low.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

from amp_graph.passes.precision.max_flow import sink_side

FULL_ALWAYS, LOW_ALWAYS = 0, 1  # the first two variables of every task stand for the two precisions themselves


@dataclass(frozen=True)
class Cast:
    """The cost of the casts of one value; each cast counts once, for any number of readers.

    ``down``: the cost if the value is full and one of ``lowers`` is low. ``up``: the cost if the value is low and one
    of ``widens`` is full.
    """

    value: int
    lowers: tuple[int, ...]
    widens: tuple[int, ...]
    down: int
    up: int

    @property
    def variables(self) -> tuple[int, ...]:
        """The variables that this cost depends on."""
        return (self.value, *self.lowers, *self.widens)

    def cost(self, low: Container[int]) -> int:
        """Return the cost where the variables in ``low`` are low."""
        return (self.up if self.value in low else self.down) if self.is_made(low) else 0

    def is_made(self, low: Container[int]) -> bool:
        """Say whether a reader needs the other precision where the variables in ``low`` are low."""
        return any(r not in low for r in self.widens) if self.value in low else any(r in low for r in self.lowers)


@dataclass(frozen=True)
class Kept:
    """The cost of saving one value for backward: ``low`` if one of ``readers`` is low, plus ``full`` if one is full."""

    readers: tuple[int, ...]
    low: int
    full: int

    @property
    def variables(self) -> tuple[int, ...]:
        """The variables that this cost depends on."""
        return self.readers

    def cost(self, low: Container[int]) -> int:
        """Return the cost where the variables in ``low`` are low."""
        lowered = self.low if any(r in low for r in self.readers) else 0
        return lowered + (self.full if any(r not in low for r in self.readers) else 0)


@dataclass(frozen=True)
class Promotion:
    """The cost if a full ``reader`` promotes a low ``operand`` itself."""

    reader: int
    operand: int
    price: int

    @property
    def variables(self) -> tuple[int, ...]:
        """The variables that this cost depends on."""
        return (self.reader, self.operand)

    def cost(self, low: Container[int]) -> int:
        """Return the cost where the variables in ``low`` are low."""
        return self.price if self.reader not in low and self.operand in low else 0


@dataclass(frozen=True)
class Task:
    """Variables that are full or low, and the costs of both, in integer picoseconds.

    ``full[i]`` and ``low[i]``: the cost of variable ``i`` alone. ``fixed``: variables with a fixed value (True: low).
    ``limits``: pairs (a, b): ``a`` may be low only if ``b`` is low.
    """

    full: tuple[int, ...]
    low: tuple[int, ...]
    fixed: Mapping[int, bool]
    limits: tuple[tuple[int, int], ...] = ()
    casts: tuple[Cast, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    kept: tuple[Kept, ...] = ()

    @property
    def terms(self) -> tuple[Cast | Promotion | Kept, ...]:
        """All costs that depend on more than one variable."""
        return (*self.casts, *self.promotions, *self.kept)


def cost(task: Task, low: Collection[int]) -> int:
    """Return the cost of the assignment in which the variables in ``low`` are low; ignores the limits."""
    low = frozenset(low)
    alone = sum(task.low[i] if i in low else task.full[i] for i in range(len(task.full)))
    return alone + sum(term.cost(low) for term in task.terms)


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
        for promotion in task.promotions:
            self._part(promotion.operand, promotion.reader, promotion.price)
        for cast in task.casts:
            self._part_any_low(cast.lowers, cast.value, cast.down)
            self._part_any_full(cast.value, cast.widens, cast.up)
        for kept in task.kept:
            self._part_any_low(kept.readers, FULL_ALWAYS, kept.low)
            self._part_any_full(LOW_ALWAYS, kept.readers, kept.full)
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

    def _part_any_low(self, readers: tuple[int, ...], value: int, price: int) -> None:
        """Add the cost ``price``, once, if any reader is low and ``value`` is full."""
        inner = {self.place.get(r, r) for r in readers} - {FULL_ALWAYS}
        if LOW_ALWAYS in inner or len(inner) == 1:
            self._part(LOW_ALWAYS if LOW_ALWAYS in inner else inner.pop(), value, price)
        elif inner and price and self.place.get(value) != LOW_ALWAYS:
            for reader in sorted(inner):
                self._part(reader, self.spare, None)
            self._part(self.spare, value, price)
            self.spare += 1

    def _part_any_full(self, value: int, readers: tuple[int, ...], price: int) -> None:
        """Add the cost ``price``, once, if ``value`` is low and any reader is full."""
        inner = {self.place.get(r, r) for r in readers} - {LOW_ALWAYS}
        if FULL_ALWAYS in inner or len(inner) == 1:
            self._part(value, FULL_ALWAYS if FULL_ALWAYS in inner else inner.pop(), price)
        elif inner and price and self.place.get(value) != FULL_ALWAYS:
            for reader in sorted(inner):
                self._part(self.spare, reader, None)
            self._part(value, self.spare, price)
            self.spare += 1

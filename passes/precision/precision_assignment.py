"""The cheapest assignment of two precisions, by a minimum cut: numbers in, numbers out; knows no graph of torch.

Before: operations with a cost in each precision, and casts with a cost each. After: the operations that are low.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass

from amp_graph.passes.precision.max_flow import sink_side

FULL_ALWAYS, LOW_ALWAYS = 0, 1  # the first two variables of every task stand for the two precisions themselves


@dataclass(frozen=True)
class Cast:
    """What the casts of one value cost, each once however many read it.

    ``down``: paid where the value is full and one of ``lowers`` is low. ``up``: paid where it is low and one of
    ``widens`` is full.
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
        if self.value in low:
            return self.up if any(r not in low for r in self.widens) else 0
        return self.down if any(r in low for r in self.lowers) else 0


@dataclass(frozen=True)
class Kept:
    """What keeping one value for backward costs: ``low`` if one of ``readers`` is low, and ``full`` if one is full."""

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
    """What a full ``reader`` pays for promoting a low ``operand`` itself."""

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
    """Variables that are full or low, and what that costs, in whole picoseconds.

    ``full[i]`` and ``low[i]``: what variable ``i`` costs by itself. ``fixed``: the variables that are decided (True:
    low). ``limits``: pairs of which the first is low only where the second is.
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
    """Return what the assignment costs in which the variables in ``low`` are low, limits or not."""
    low = frozenset(low)
    alone = sum(task.low[i] if i in low else task.full[i] for i in range(len(task.full)))
    return alone + sum(term.cost(low) for term in task.terms)


def is_legal(task: Task, low: Collection[int]) -> bool:
    """Say whether an assignment keeps to what is fixed and to the limits."""
    return all((i in low) == is_low for i, is_low in task.fixed.items()) and all(
        a not in low or b in low for a, b in task.limits
    )


def cheapest(task: Task) -> frozenset[int]:
    """Return the low variables of a legal assignment of least cost; of several, the one with the most.

    Two precisions and costs that each fall on disagreement make this a minimum cut: low is the source's side. What a
    value's casts cost once is one node between the value and its readers. Raises ValueError where no assignment is
    legal.
    """
    decided = _decided(task)
    gains, edges = _Drawing(task, decided).drawn()
    full = sink_side(gains, edges)
    return frozenset(i for i in range(len(task.full)) if decided.get(i, i not in full))


def _decided(task: Task) -> dict[int, bool]:
    """Return what is fixed, and what follows from it by the limits."""
    decided = {**task.fixed, FULL_ALWAYS: False, LOW_ALWAYS: True}
    lower: dict[int, list[int]] = {}  # full here makes full there
    raise_: dict[int, list[int]] = {}  # low here makes low there
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
                raise ValueError(f"variables {i} and {j} are fixed against a limit between them")
    return decided


class _Drawing:
    """The network of a task, with every decided variable in the place of the precision that it has."""

    def __init__(self, task: Task, decided: Mapping[int, bool]) -> None:
        self.task = task
        self.place = {i: LOW_ALWAYS if is_low else FULL_ALWAYS for i, is_low in decided.items()}
        self.spare = len(task.full)  # the next number for a node of our own
        self.gains: dict[int, int] = {}
        self.edges: dict[tuple[int, int], int | None] = {}

    def drawn(self) -> tuple[dict[int, int], dict[tuple[int, int], int | None]]:
        """Return what each node gains by being low, and what parting two nodes costs."""
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
        """Let it cost ``price`` that ``a`` is low and ``b`` full; None: it may not be."""
        a, b = self.place.get(a, a), self.place.get(b, b)
        if price == 0 or a == b or a == FULL_ALWAYS or b == LOW_ALWAYS or (a, b) == (LOW_ALWAYS, FULL_ALWAYS):
            return
        if price is not None and a == LOW_ALWAYS:
            self.gains[b] = self.gains.get(b, 0) + price
        elif price is not None and b == FULL_ALWAYS:
            self.gains[a] = self.gains.get(a, 0) - price
        elif price is None or self.edges.get((a, b), 0) is None:
            self.edges[a, b] = None  # what a limit says of decided variables is decided too
        else:
            self.edges[a, b] = (self.edges.get((a, b)) or 0) + price

    def _part_any_low(self, readers: tuple[int, ...], value: int, price: int) -> None:
        """Let it cost ``price``, once, that any reader is low and ``value`` full."""
        inner = {self.place.get(r, r) for r in readers} - {FULL_ALWAYS}
        if LOW_ALWAYS in inner or len(inner) == 1:
            self._part(LOW_ALWAYS if LOW_ALWAYS in inner else inner.pop(), value, price)
        elif inner and price and self.place.get(value) != LOW_ALWAYS:
            for reader in sorted(inner):
                self._part(reader, self.spare, None)
            self._part(self.spare, value, price)
            self.spare += 1

    def _part_any_full(self, value: int, readers: tuple[int, ...], price: int) -> None:
        """Let it cost ``price``, once, that ``value`` is low and any reader full."""
        inner = {self.place.get(r, r) for r in readers} - {LOW_ALWAYS}
        if FULL_ALWAYS in inner or len(inner) == 1:
            self._part(value, FULL_ALWAYS if FULL_ALWAYS in inner else inner.pop(), price)
        elif inner and price and self.place.get(value) != FULL_ALWAYS:
            for reader in sorted(inner):
                self._part(self.spare, reader, None)
            self._part(value, self.spare, price)
            self.spare += 1

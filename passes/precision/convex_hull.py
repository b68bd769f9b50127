"""Find the cheapest assignment whose harm stays within a bound, on the lower convex hull; works on numbers only.

Before: a task with costs, the same task with harms, a bound. After: the operations that run in low precision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from amp_graph.passes.precision.precision_assignment import Task, cheapest, cost, is_legal, most


@dataclass(frozen=True)
class Point:
    """An assignment: its low variables, its cost and its harm."""

    low: frozenset[int]
    cost: int
    harm: int


class Tradeoff:
    """Assignments between the cheapest and the least harmful one.

    ``harm`` and ``costs`` have the same variables, fixed variables and limits. For any weight of harm against cost,
    one minimum cut finds the best assignment; so the search can walk the lower convex hull of all (harm, cost) pairs.
    It cannot find an assignment above the hull, even where that one is the best within a bound.
    """

    def __init__(self, costs: Task, harm: Task) -> None:
        self.costs, self.harm = costs, harm
        self._solved: dict[tuple[int, int], Point] = {}  # ten budgets ask for most of them again

    def point(self, low: Collection[int]) -> Point:
        """Return an assignment with its cost and its harm."""
        return Point(frozenset(low), cost(self.costs, low), cost(self.harm, low))

    def fastest(self) -> Point:
        """Return an assignment of least cost; among several, one of least harm."""
        return self._best(1 + most(self.harm), 1)

    def safest(self) -> Point:
        """Return an assignment of least harm; among several, one of least cost."""
        return self._best(1, 1 + most(self.costs))

    def within(self, bound: int, others: Iterable[Point] = ()) -> Point:
        """Return the cheapest assignment found with harm up to ``bound``, or the safest one if there is none.

        Searches for the edge of the hull that crosses ``bound`` by the slope between the best known points on both
        sides, as LARAC does (A. Juettner et al., INFOCOM 2001), and takes its end within. Returns one of ``others``
        (assignments from elsewhere) if that is legal and cheaper.
        """
        found = self._on_hull(bound)
        legal = [p for p in others if p.harm <= bound and is_legal(self.costs, p.low)]
        return min([found, *legal], key=lambda p: (p.cost, p.harm)) if found.harm <= bound else found

    def _on_hull(self, bound: int) -> Point:
        beyond, inside = self.fastest(), self.safest()
        if beyond.harm <= bound:
            return beyond
        if inside.harm > bound:
            return inside
        while True:
            a, b = beyond.harm - inside.harm, inside.cost - beyond.cost
            found = self._best(a, b)
            if a * found.cost + b * found.harm == a * inside.cost + b * inside.harm:  # on the edge itself
                return found if found.harm <= bound else inside
            beyond, inside = (beyond, found) if found.harm <= bound else (found, inside)

    def _best(self, of_cost: int, of_harm: int) -> Point:
        key = (of_cost, of_harm)
        if key not in self._solved:
            self._solved[key] = self.point(cheapest(weighted(self.costs, of_cost, self.harm, of_harm)))
        return self._solved[key]


def weighted(costs: Task, of_cost: int, harm: Task, of_harm: int) -> Task:
    """Return the task whose costs are ``of_cost * costs + of_harm * harm``."""
    both = ((costs, of_cost), (harm, of_harm))
    return replace(
        costs,
        full=tuple(of_cost * x + of_harm * y for x, y in zip(costs.full, harm.full, strict=True)),
        low=tuple(of_cost * x + of_harm * y for x, y in zip(costs.low, harm.low, strict=True)),
        terms=tuple(replace(term, price=factor * term.price) for task, factor in both for term in task.terms),
    )
